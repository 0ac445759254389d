"""What Airflow's provider discovery is told of this package."""

from __future__ import annotations

from typing import Any

_VERSION = "0.1.0"


def _option(description: str, *, kind: str, default: str, example: str | None = None) -> dict[str, Any]:
    return {
        "description": description,
        "version_added": _VERSION,
        "type": kind,
        "example": example,
        "default": default,
    }


_OPTIONS = {
    "policy_file": _option(
        "Path of the policy file (YAML): what each profile may use, and which cluster it goes to.",
        kind="string",
        default="",
        example="/etc/airflow/profsched.yaml",
    ),
    "instance": _option(
        "Name of this Airflow, where several submit to one cluster with one work_dir; part of every job's key.",
        kind="string",
        default="",
        example="staging",
    ),
    "slurm_conf": _option(
        "Path of slurm.conf for the commands; empty: the environment's SLURM_CONF, or Slurm's own default.",
        kind="string",
        default="",
        example="/etc/slurm/slurm.conf",
    ),
    "slurm_bin_dir": _option(
        "Directory of sbatch, squeue, sacct, scontrol, scancel and sacctmgr; empty: the usual ones.",
        kind="string",
        default="",
        example="/opt/slurm/bin",
    ),
    "log_bytes": _option(
        "How much of the end of each attempt's log is copied into the task's log, in bytes.",
        kind="integer",
        default="262144",
    ),
}

_CLUSTER_FIELD = {
    "label": "Slurm cluster",
    "description": "Name of the cluster in a federation or multi-cluster set-up (SLURM_CLUSTERS); empty: the default one.",
    "schema": {"type": ["string", "null"], "pattern": "^[A-Za-z0-9_.-]*$"},
}
_JOB_URL_FIELD = {
    "label": "Job URL",
    "description": "Page of a job for the link in the UI, with {job_id}: https://grafana.example.org/d/job?var-job={job_id}",
    "schema": {"type": ["string", "null"]},
}


def get_provider_info() -> dict[str, Any]:
    """Describe the provider: connection type, links, configuration.

    Returns:
        The dictionary that the entry point `apache_airflow_provider` promises.
    """
    return {
        "package-name": "airflow-profsched",
        "name": "Workload profiles (Slurm, Kubernetes)",
        "description": "Training and inference by workload profile on Slurm and Kubernetes, resumed after preemption.",
        "versions": [_VERSION],
        "connection-types": [
            {
                "connection-type": "slurm",
                "hook-class-name": "airflow_profsched.hooks.slurm.SlurmHook",
                "hook-name": "Slurm",
                "ui-field-behaviour": {
                    "hidden-fields": ["host", "port", "schema", "login", "password"],
                    "relabeling": {},
                    "placeholders": {},
                },
                "conn-fields": {"cluster": _CLUSTER_FIELD, "job_url": _JOB_URL_FIELD},
            }
        ],
        "hooks": [
            {"integration-name": "Slurm", "python-modules": ["airflow_profsched.hooks.slurm"]},
        ],
        "operators": [
            {"integration-name": "Slurm", "python-modules": ["airflow_profsched.operators"]},
        ],
        "triggers": [
            {"integration-name": "Slurm", "python-modules": ["airflow_profsched.triggers.workload"]},
        ],
        "extra-links": ["airflow_profsched.links.JobLink"],
        "config": {
            "profsched": {
                "description": "airflow-profsched: workload profiles for training and inference.",
                "options": _OPTIONS,
            }
        },
    }
