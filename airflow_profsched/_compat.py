"""Every switch between Airflow's versions, each with its reason. Nothing else in the package looks at versions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from datetime import timedelta

from airflow.triggers.base import BaseTrigger

TRIGGER_ON_KILL = hasattr(BaseTrigger, "on_kill")
"""3.3 tells a trigger that a user ended its task; before, only `cleanup` runs, at every exit."""


class StateStore(Protocol):
    """A task instance's record that survives its tries (3.3 and later)."""

    def get(self, key: str, default: Any = None) -> Any:
        """Return what was kept."""

    def set(self, key: str, value: Any, *, retention: timedelta | None = None) -> None:
        """Keep a value."""


class NoStore:
    """Airflow before 3.3 keeps nothing over tries: the cluster is asked by key instead."""

    def get(self, key: str, default: Any = None) -> Any:  # noqa: ARG002 - the protocol's
        """Return the default."""
        return default

    def set(self, key: str, value: Any, *, retention: timedelta | None = None) -> None:
        """Keep nothing."""


class _NeverExpire:
    """Writes with `NEVER_EXPIRE`: the default retention of 30 days is shorter than a training."""

    def __init__(self, store: StateStore) -> None:
        from airflow.sdk.execution_time.context import NEVER_EXPIRE  # noqa: PLC0415 - 3.3 and later only

        self._store, self._retention = store, NEVER_EXPIRE

    def get(self, key: str, default: Any = None) -> Any:
        """Return what was kept."""
        return self._store.get(key, default)

    def set(self, key: str, value: Any, *, retention: timedelta | None = None) -> None:
        """Keep a value until it is deleted."""
        self._store.set(key, value, retention=retention or self._retention)


def state_store(context: Mapping[str, Any]) -> StateStore:
    """Return the store of the running task instance.

    Args:
        context: the task's context.

    Returns:
        Its store, or one that keeps nothing where Airflow has none.
    """
    store = context.get("task_state_store")
    return NoStore() if store is None else _NeverExpire(store)


def task_state(dag_id: str, run_id: str, task_id: str, map_index: int) -> str | None:
    """Ask Airflow how a task instance stands now. Blocking; in a trigger it belongs into a thread.

    Args:
        dag_id: its DAG.
        run_id: its run.
        task_id: the task.
        map_index: -1 where it is not mapped.

    Returns:
        The state's word; None where Airflow does not know the task instance any more.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance  # noqa: PLC0415 - heavy, and not for parsing

    states = RuntimeTaskInstance.get_task_states(
        dag_id=dag_id, task_ids=[task_id], run_ids=[run_id], map_index=map_index
    )
    # The endpoint names mapped instances by task and index, the others by the task alone.
    name = f"{task_id}_{map_index}" if map_index >= 0 else task_id
    state = states.get(run_id, {}).get(name)
    return None if state is None else str(getattr(state, "value", state))
