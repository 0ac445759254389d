"""How one run is watched, step by step; the worker and the triggerer carry the same conversations."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from airflow_profsched.core.errors import ClusterUnavailableError
from airflow_profsched.core.evidence import Findings, findings_from_json
from airflow_profsched.core.jobs import JobRef, JobSnapshot, JobState
from airflow_profsched.core.lifecycle import Action, Cancel, Nudge, Observation, Rules, StopAttempt, Watch, advance

if TYPE_CHECKING:
    from collections.abc import Collection

    from airflow_profsched.cluster.exchange import Exchange, Look
    from airflow_profsched.cluster.scheduler import Scheduler
    from airflow_profsched.core.run import Run

_MAY_HAVE_ENDED = (JobState.RUNNING, JobState.UNDETERMINED)
_WAITS = (JobState.QUEUED, JobState.REQUEUED)
"""The states in which the cluster's reason tells whether it can ever start; who is held waits for a person."""


@dataclass(frozen=True, slots=True)
class Watched:
    """What is watched: the cluster, what does not change, and where the attempt's files lie.

    Args:
        scheduler: the cluster.
        rules: what does not change over the run.
        look: the look at the newest attempt's directories.
    """

    scheduler: Scheduler
    rules: Rules
    look: Look


def reference(run: Run) -> JobRef:
    """Name the run's job, and what tells it from another of the same id."""
    return JobRef(run.job_id, run.task.name, run.submitted_s)


def step(
    watched: Watched, run: Run, job: JobSnapshot | None, notes: Collection[str], now_s: float
) -> Exchange[tuple[Run, Action]]:
    """Take one step of a run: look where that may decide something, decide, and do what needs no new job.

    Args:
        watched: what is watched.
        run: what is known.
        job: what the cluster said; None where it does not know the job.
        notes: what its node has noted since the step before.
        now_s: epoch seconds.

    Returns:
        The run to keep, and what the caller has to do. A nudge or a stop is done here and comes back as Watch.
    """
    found = None
    if job is None or job.state.ended or _may_have_ended(run, job, notes):
        found = yield from look(watched.look)
    hopeless = watched.scheduler.hopeless(job) if job is not None and job.state in _WAITS else ""
    run, action = advance(run, Observation(now_s, job, found, hopeless), watched.rules)
    yield from _act(watched.scheduler, run, action)
    return run, (Watch() if isinstance(action, (Nudge, StopAttempt)) else action)


def look(request: Look) -> Exchange[Findings]:
    """Look at what an attempt left.

    Args:
        request: where.

    Returns:
        What was found; nothing, and why, where the directories cannot be read.
    """
    reply = yield request
    if reply.code:
        return Findings(strange=(reply.err,))
    return findings_from_json(reply.out)


def _may_have_ended(run: Run, job: JobSnapshot, notes: Collection[str]) -> bool:
    noted = "end" in notes or run.marked_since_s is not None
    return job.state in _MAY_HAVE_ENDED and (noted or job.detailed)


def _act(scheduler: Scheduler, run: Run, action: Action) -> Exchange[None]:
    if isinstance(action, Nudge):
        yield from scheduler.nudge(run.job_id)
    elif isinstance(action, StopAttempt):
        yield from scheduler.cancel(run.job_id, action.why)
    elif isinstance(action, Cancel):
        yield from scheduler.cancel(run.job_id, action.failure.message)


def past_deadline(watched: Watched, run: Run, now_s: float) -> Exchange[tuple[Run, Action]]:
    """Take the one step that needs no answer of the cluster: its deadline.

    Args:
        watched: what is watched.
        run: what is known.
        now_s: epoch seconds.

    Returns:
        As :func:`step`; Watch before the deadline. A job that cannot be cancelled now is left: an orphan.
    """
    if watched.rules.deadline_s is None or now_s < watched.rules.deadline_s:
        return run, Watch()
    run, action = advance(run, Observation(now_s), watched.rules)
    if not isinstance(action, Cancel):
        return run, action
    try:
        yield from _act(watched.scheduler, run, action)
    except ClusterUnavailableError as error:
        words = f"{action.failure.message}. The cluster does not answer ({error}), so its job may run on"
        return run, replace(action.failure, message=f"{words}: `profsched orphans` will list it")
    return run, action
