"""What the commands of `profsched` do."""

from __future__ import annotations

from airflow_profsched.commands.clusters import doctor, jobs, orphans
from airflow_profsched.commands.policy import explain, schema, validate

__all__ = ["doctor", "explain", "jobs", "orphans", "schema", "validate"]
