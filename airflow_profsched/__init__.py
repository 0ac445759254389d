"""airflow-profsched: workload profiles for training and inference on Slurm and Kubernetes.

Exports what a DAG file needs beside the operators; see docs/ for the rest.
"""

from __future__ import annotations

from airflow_profsched.core.profiles import Budgets, Checkpoint, Resources

__version__ = "0.1.0"

__all__ = ["Budgets", "Checkpoint", "Resources", "__version__"]
