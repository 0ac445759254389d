"""The operators. Importing them imports Airflow's SDK, pydantic and the standard library, nothing else: see docs/explanation."""

from __future__ import annotations

from airflow_profsched.operators.workload import InferenceOperator, TrainingOperator, WorkloadOperator

__all__ = ["InferenceOperator", "TrainingOperator", "WorkloadOperator"]
