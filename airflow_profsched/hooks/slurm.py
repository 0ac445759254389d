"""The Slurm connection."""

from __future__ import annotations

import os
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import AirflowNotFoundException, BaseHook, conf

from airflow_profsched.cluster.exchange import run
from airflow_profsched.core.errors import ProfschedError

if TYPE_CHECKING:
    from airflow_profsched.cluster.transports import AsyncLocalSender, LocalSender


class SlurmHook(BaseHook):
    """Speaks to Slurm through the commands of this host, as the user Airflow runs as.

    Where and which the commands are stands in Airflow's configuration (`[profsched] slurm_bin_dir`, `slurm_conf`), never
    in a connection: whoever may edit connections must not gain execution on every worker.

    Args:
        slurm_conn_id: the connection. `slurm_default` need not exist; it then means this host's own Slurm.
    """

    conn_name_attr = "slurm_conn_id"
    default_conn_name = "slurm_default"
    conn_type = "slurm"
    hook_name = "Slurm"

    def __init__(self, slurm_conn_id: str = default_conn_name) -> None:
        super().__init__()
        self.slurm_conn_id = slurm_conn_id

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        """Hide the fields that this connection has no use for (Airflow 3.1; later ones read the provider info)."""
        return {"hidden_fields": ["host", "port", "schema", "login", "password"], "relabeling": {}, "placeholders": {}}

    @cached_property
    def extra(self) -> dict[str, Any]:
        """The connection's extra fields: `cluster` and `job_url`; empty without a connection."""
        try:
            connection = self.get_connection(self.slurm_conn_id)
        except AirflowNotFoundException:
            if self.slurm_conn_id != self.default_conn_name:
                raise
            return {}
        return dict(connection.extra_dejson)

    def get_conn(self) -> LocalSender:
        """Return the blocking sender.

        Returns:
            A sender for :func:`airflow_profsched.cluster.exchange.run`.
        """
        from airflow_profsched.cluster.transports import LocalSender  # noqa: PLC0415 - not while a DAG is parsed

        return LocalSender(**_sender_options(self.extra))

    def test_connection(self) -> tuple[bool, str]:
        """Ask the controller for its configuration and, where there is one, the accounting for its QoS.

        Returns:
            Whether both answered, and what they said, in words.
        """
        from airflow_profsched.slurm.site import read_site  # noqa: PLC0415 - not while a DAG is parsed

        try:
            site = run(read_site(), self.get_conn())
        except ProfschedError as error:
            return False, str(error)
        return True, site.words()


async def async_sender(conn_id: str) -> AsyncLocalSender:
    """Return the async sender of a connection, for the triggerer.

    Args:
        conn_id: the connection.

    Returns:
        A sender for :func:`airflow_profsched.cluster.exchange.arun`.
    """
    from airflow_profsched.cluster.transports import AsyncLocalSender  # noqa: PLC0415 - not while a DAG is parsed

    try:
        extra = (await BaseHook.aget_connection(conn_id)).extra_dejson
    except AirflowNotFoundException:
        if conn_id != SlurmHook.default_conn_name:
            raise
        extra = {}
    return AsyncLocalSender(**_sender_options(extra))


def _sender_options(extra: dict[str, Any]) -> dict[str, Any]:
    env = {}
    slurm_conf = conf.get("profsched", "slurm_conf", fallback="") or os.environ.get("SLURM_CONF", "")
    if slurm_conf:
        env["SLURM_CONF"] = slurm_conf
    if extra.get("cluster"):
        env["SLURM_CLUSTERS"] = str(extra["cluster"])
    return {"bin_dir": conf.get("profsched", "slurm_bin_dir", fallback=""), "env": env}
