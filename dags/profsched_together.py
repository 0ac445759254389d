"""Where both meet: a training holds every GPU, an inference arrives and takes them, the training comes back.

`retries=0` everywhere: a preemption is no failure.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from airflow.providers.standard.sensors.time_delta import WaitSensor
from airflow.sdk import DAG

from airflow_profsched import Checkpoint, Resources
from airflow_profsched.operators import InferenceOperator, TrainingOperator

PROGRAMS = Path(__file__).parent / "programs"
TRAIN = (PROGRAMS / "train.py").read_text(encoding="utf-8")
SCORE = (PROGRAMS / "score.py").read_text(encoding="utf-8")

with DAG("profsched_together", schedule=None, catchup=False, tags=["profsched", "example"]) as dag:
    train = TrainingOperator(
        task_id="train",
        command=["python3", "-c", TRAIN, "--epochs", "60", "--every", "20", "--seconds-per-epoch", "1"],
        resources=Resources(nodes=1, gpus=4, cpus=1, walltime="1h"),
        checkpoint=Checkpoint(layout="manifest"),
        deferrable=True,
        retries=0,
    )
    # A second training takes the other half of a cluster of two nodes: there is no room left but by preemption.
    neighbour = TrainingOperator(
        task_id="neighbour",
        command=["python3", "-c", TRAIN, "--epochs", "70", "--every", "20", "--seconds-per-epoch", "1", "--seed", "8"],
        resources=Resources(nodes=1, gpus=4, cpus=1, walltime="1h"),
        checkpoint=Checkpoint(layout="manifest"),
        deferrable=True,
        retries=0,
    )
    users_arrive = WaitSensor(task_id="users_arrive", time_to_wait=timedelta(seconds=20), deferrable=True)
    score = InferenceOperator(
        task_id="score",
        command=["python3", "-c", SCORE, "--seconds", "12"],
        resources=Resources(gpus=4, cpus=1, walltime="10m"),
        deferrable=True,
        retries=0,
    )
    users_arrive >> score
