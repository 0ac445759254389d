"""An inference pipeline: one mapped task scores every batch, each as a job of its own."""

from __future__ import annotations

from pathlib import Path

from airflow.sdk import DAG, task

from airflow_profsched import Resources
from airflow_profsched.operators import InferenceOperator

SCORE = (Path(__file__).parent / "programs" / "score.py").read_text(encoding="utf-8")

with DAG("profsched_inference", schedule=None, catchup=False, tags=["profsched", "example"]) as dag:

    @task
    def batches() -> list[list[str]]:
        """List the batches, as the command that scores each."""
        return [["python3", "-c", SCORE, "--batch", str(batch)] for batch in range(3)]

    @task
    def collect(answers: list[dict[str, float]]) -> float:
        """Average over all batches."""
        return sum(answer["accuracy"] for answer in answers) / len(answers)

    score = InferenceOperator.partial(
        task_id="score",
        resources=Resources(gpus=1, cpus=1, walltime="10m"),
        deferrable=True,
        retries=0,
    ).expand(command=batches())

    collect(score.output)
