"""The Airflow plugin. It is imported in every task process, so it imports nothing but Airflow's plugin manager."""

from __future__ import annotations

from airflow.plugins_manager import AirflowPlugin


class ProfschedPlugin(AirflowPlugin):
    """Announces the package to Airflow; the UI page comes with a later issue."""

    name = "profsched"
