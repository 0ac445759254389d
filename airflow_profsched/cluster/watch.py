"""How one run is watched, step by step; the worker and the triggerer carry the same conversations."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from airflow_profsched.cluster.exchange import Exchange, Look
from airflow_profsched.cluster.scheduler import Scheduler
from airflow_profsched.core.evidence import Findings, findings_from_json
from airflow_profsched.core.jobs import JobRef, JobSnapshot, JobState
from airflow_profsched.core.lifecycle import Action, Cancel, Nudge, Observation, Rules, StopAttempt, Watch, advance
from airflow_profsched.core.run import Run


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


def step(watched: Watched, run: Run, job: JobSnapshot | None, notes: Collection[str], now_s: float) -> Exchange[
    tuple[Run, Action]
]:
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
    hopeless = "" if job is None or job.state is not JobState.QUEUED else watched.scheduler.hopeless(job)
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
    return job.state is JobState.RUNNING and (noted or job.detailed)


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
        As :func:`step`; Watch before the deadline.
    """
    if watched.rules.deadline_s is None or now_s < watched.rules.deadline_s:
        return run, Watch()
    run, action = advance(run, Observation(now_s), watched.rules)
    yield from _act(watched.scheduler, run, action)
    return run, action
