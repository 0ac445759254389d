"""A training pipeline: prepare, train with checkpoints, evaluate.

The programs travel inside the command, so that the DAG runs wherever its jobs do: nodes need python3 and nothing else.
"""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG, task

from airflow_profsched import Checkpoint, Resources
from airflow_profsched.operators import InferenceOperator, TrainingOperator

PROGRAMS = Path(__file__).parent / "programs"
TRAIN = (PROGRAMS / "train.py").read_text(encoding="utf-8")
SCORE = (PROGRAMS / "score.py").read_text(encoding="utf-8")

with DAG("profsched_training", schedule=None, catchup=False, tags=["profsched", "example"]) as dag:

    @task
    def prepare() -> dict[str, str]:
        """Choose the data set and the length of the training."""
        return {"seed": "7", "rows": "2000", "epochs": "60"}

    data = prepare()

    train = TrainingOperator(
        task_id="train",
        command=[
            "python3", "-c", TRAIN,
            "--seed", "{{ ti.xcom_pull(task_ids='prepare')['seed'] }}",
            "--rows", "{{ ti.xcom_pull(task_ids='prepare')['rows'] }}",
            "--epochs", "{{ ti.xcom_pull(task_ids='prepare')['epochs'] }}",
            "--seconds-per-epoch", "0.1",
        ],
        resources=Resources(nodes=1, gpus=4, cpus=1, walltime="1h"),
        checkpoint=Checkpoint(layout="manifest"),
        deferrable=True,
        retries=0,
    )  # fmt: skip

    evaluate = InferenceOperator(
        task_id="evaluate",
        command=[
            "python3", "-c", SCORE,
            "--seed", "{{ ti.xcom_pull(task_ids='train')['seed'] }}",
            "--weights", "{{ ti.xcom_pull(task_ids='train')['weights'] | tojson }}",
        ],
        resources=Resources(gpus=1, cpus=1, walltime="10m"),
        deferrable=True,
        retries=0,
    )  # fmt: skip

    data >> train >> evaluate
