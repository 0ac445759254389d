"""What an operator asks for, turned into what the floors below understand."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from airflow.providers.common.compat.sdk import conf
from pydantic import BaseModel, ValidationError

from airflow_profsched.cluster import workdir
from airflow_profsched.core.errors import PolicyError
from airflow_profsched.core.jobs import TaskKey
from airflow_profsched.core.placement import SlurmPlacement, TaskRequest, resolve
from airflow_profsched.core.profiles import Checkpoint, Resources
from airflow_profsched.hooks.policy import load_policy
from airflow_profsched.slurm.site import notice_s

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from airflow_profsched.core.run import Run
    from airflow_profsched.hooks.desk import Desk
    from airflow_profsched.operators.workload import WorkloadOperator

ModelT = TypeVar("ModelT", bound=BaseModel)

OWNER_POLL_S = 5
HEARTBEAT_S = 60


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be run, whatever the attempt.

    Args:
        command: the argument vector.
        env: its variables, rendered; secret until proved otherwise.
        cwd: its working directory; empty: the task's directory.
        try_number: Airflow's try.
        fresh_on_retry: whether a later try starts with an empty checkpoint directory.
        cleared: whether this is the first try after a clear: it wants a fresh job, not one that is still alive.
        traceparent: W3C trace context, where Airflow traces.
    """

    command: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str = ""
    try_number: int = 1
    fresh_on_retry: bool = False
    cleared: bool = False
    traceparent: str = ""


def task_key(context: Context) -> TaskKey:
    """Return the key of the running task instance.

    Args:
        context: the task's context.

    Returns:
        The key, with this Airflow's name from `[profsched] instance`.
    """
    ti = context["ti"]
    map_index = -1 if ti.map_index is None else int(ti.map_index)
    instance = str(conf.get("profsched", "instance", fallback=""))
    return TaskKey(ti.dag_id, ti.run_id, ti.task_id, map_index, instance)


def plan(operator: WorkloadOperator, context: Context) -> Plan:
    """Read what an operator wants to run.

    Args:
        operator: the operator, rendered.
        context: the task's context.

    Returns:
        The plan.

    Raises:
        PolicyError: the command or the environment is not what it must be.
    """
    command = operator.command
    if isinstance(command, str) or not command or not all(isinstance(word, str) for word in command):
        msg = (
            f"task {operator.task_id}: command must be a list of words such as ['python', 'train.py'], not {command!r}"
        )
        raise PolicyError(msg)
    # Rendered here and not as a template field: Airflow keeps rendered fields in its database and shows them.
    env = operator.render_template(dict(operator.env or {}), context)
    checkpoint = model(Checkpoint, operator.checkpoint, operator.task_id)
    return Plan(
        command=tuple(command),
        env={str(name): str(value) for name, value in env.items()},
        cwd=operator.cwd or "",
        try_number=int(context["ti"].try_number),
        fresh_on_retry=checkpoint is not None and checkpoint.fresh_on_retry,
        cleared=_cleared(operator, context),
        traceparent=os.environ.get("TRACEPARENT", ""),
    )


def _cleared(operator: WorkloadOperator, context: Context) -> bool:
    """A clear sets a task instance's `max_tries` to its tries so far and the task's retries; a retry leaves it alone."""
    before = (getattr(context["ti"], "max_tries", None) or 0) - (operator.retries or 0)
    return before > 0 and int(context["ti"].try_number) == before + 1


def model(kind: type[ModelT], value: Any, task_id: str) -> ModelT | None:
    """Read an argument that is a model or a mapping of its fields.

    Args:
        kind: the model.
        value: the argument, rendered.
        task_id: for the message.

    Returns:
        The model; None for None.

    Raises:
        PolicyError: the mapping does not fit.
    """
    if value is None or isinstance(value, kind):
        return value
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise PolicyError(f"task {task_id}: {kind.__name__.lower()} cannot be read: {error}") from error


def placement(operator: WorkloadOperator, context: Context) -> SlurmPlacement:
    """Ask the policy where and how the operator runs.

    Args:
        operator: the operator, rendered.
        context: the task's context.

    Returns:
        The placement.

    Raises:
        PolicyError: the policy file is wrong, or does not offer what is asked for.
    """
    resources = model(Resources, operator.needs, operator.task_id) or Resources()
    request = TaskRequest(
        profile=operator.profile,
        resources=resources,
        checkpoint=model(Checkpoint, operator.checkpoint, operator.task_id),
        cluster=operator.cluster,
        project=operator.project,
        overrides=operator.overrides or {},
        dag_id=context["ti"].dag_id,
        task_id=operator.task_id,
        owner=str(operator.owner),
        dag_tags=tuple(sorted(getattr(context.get("dag"), "tags", ()) or ())),
        image=operator.image or "",
        budgets=operator.budgets,
    )
    return resolve(load_policy(), request)


def deadline(operator: WorkloadOperator, context: Context, placed: SlurmPlacement) -> float | None:
    """Say when the whole task must have ended: Airflow's `execution_timeout` and the budget's deadline, the earlier one.

    Args:
        operator: the operator.
        context: the task's context.
        placed: the placement.

    Returns:
        Epoch seconds; None where neither is set. Airflow does not enforce `execution_timeout` while a task is deferred.
    """
    start_s = context["ti"].start_date.timestamp()
    timeout = operator.execution_timeout
    limits = [timeout.total_seconds()] if timeout is not None else []
    limits += [placed.budgets.deadline_s] if placed.budgets.deadline_s is not None else []
    return start_s + min(limits) if limits else None


def lay_out(made: Plan, desk: Desk, run: Run, script: str) -> None:
    """Write everything an attempt needs into its directory.

    Args:
        made: the plan.
        desk: the placement at work.
        run: the run, about to be submitted.
        script: the batch script, for the record.

    Raises:
        AttemptExistsError: somebody has taken this attempt's number.
        WorkDirError: the directory cannot be written.
    """
    sharing = workdir.Sharing(desk.placement.files_group, desk.placement.files_umask)
    workdir.prepare_attempt(desk.paths(run.key), _spec(made, desk, run), dict(made.env), script, sharing)


def _spec(made: Plan, desk: Desk, run: Run) -> dict[str, Any]:
    placed, paths = desk.placement, desk.paths(run.key)
    needs = placed.resources
    grace_s = float(placed.grace_s) if desk.site is None else notice_s(desk.site, placed)
    return {
        "version": 1,
        "task": run.task.name,
        "key": run.key.name,
        "attempt": run.attempt,
        "nonce": run.nonce,
        "cluster": placed.cluster,
        "profile": placed.profile,
        "preemptible": placed.preemptible,
        "argv": list(made.command),
        "cwd": made.cwd or None,
        "work_dir": placed.work_dir,
        "task_dir": paths.task_dir,
        "attempt_dir": paths.attempt_dir,
        "mailbox_dir": paths.mailbox_dir,
        "checkpoint_dir": desk.checkpoint_dir(run.task),
        "layout": placed.layout,
        "grace_s": grace_s,
        "stop_signal": placed.stop_signal,
        "checkpoint_interval_s": placed.checkpoint_interval_s,
        "ranks": desk.rules.ranks,
        "nodes": needs.nodes,
        "tasks_per_node": needs.tasks_per_node,
        "gpus_per_node": needs.gpus or 0,
        "walltime_s": placed.walltime_s,
        "heartbeat_s": HEARTBEAT_S,
        "owner_poll_s": OWNER_POLL_S,
        # Processes of a lost node may live on: the new attempt waits until they must have seen the owner file.
        "fence_s": 3 * OWNER_POLL_S if run.fence else 0,
        "traceparent": made.traceparent,
    }
