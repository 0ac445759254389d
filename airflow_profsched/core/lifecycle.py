"""The machine of preemption and resume.

Rule 1: every decision about another attempt is here. Rule 2: it knows no cluster and no Airflow.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import Union

from airflow_profsched.core.evidence import Findings, Verdict, all_ended, settle, settle_unknown
from airflow_profsched.core.jobs import EndCause, JobSnapshot, JobState
from airflow_profsched.core.run import Attempt, Phase, Run, recorded, stopped_for, waiting


class Recovery(str, Enum):
    """What an end means for the task."""

    SUCCEED = "succeed"
    RESUME = "resume"
    RESUME_IF_PROGRESS = "resume_if_progress"
    FAIL = "fail"
    """The user's to mend: spends a retry, where there is one."""
    FAIL_FOR_GOOD = "fail_for_good"
    """Another try would end the same way, or somebody wanted this end."""


RECOVERY: dict[EndCause, Recovery] = {
    EndCause.COMPLETED: Recovery.SUCCEED,
    EndCause.CHECKPOINTED: Recovery.RESUME,
    EndCause.PREEMPTED: Recovery.RESUME,
    EndCause.DISRUPTED: Recovery.RESUME,
    EndCause.NODE_FAIL: Recovery.RESUME,
    EndCause.BOOT_FAIL: Recovery.RESUME,
    EndCause.LAUNCH_FAILED: Recovery.RESUME,
    EndCause.LOST: Recovery.RESUME,
    EndCause.TIMEOUT: Recovery.RESUME_IF_PROGRESS,
    EndCause.NONZERO_EXIT: Recovery.FAIL,
    EndCause.OUT_OF_MEMORY: Recovery.FAIL,
    EndCause.DEADLINE: Recovery.FAIL_FOR_GOOD,
    EndCause.CANCELLED: Recovery.FAIL_FOR_GOOD,
    EndCause.CONFIG: Recovery.FAIL_FOR_GOOD,
}

_BY_ITS_NODE = (EndCause.NODE_FAIL, EndCause.BOOT_FAIL, EndCause.LAUNCH_FAILED)
_UNLUCKY_WITHIN_S = 60.0
_DELAY_S, _LONGEST_DELAY_S = 5.0, 600.0
_MARKED_FOR_S = 60.0
_MOST_EXCLUDED = 16


@dataclass(frozen=True, slots=True)
class Rules:
    """What does not change over a run.

    Args:
        cluster: its name, for messages.
        checkpointed: whether its program writes checkpoints.
        ranks: how many end markers a whole end has.
        without_progress: resumes in a row without a newer checkpoint that are allowed.
        unproven: resumes in a row whose checkpoint cannot be seen that are allowed.
        walltime_notice_s: how long before the walltime limit a notice was asked for; None where none was.
        deadline_s: when the whole task must have ended, epoch seconds; None where it need not.
        evidence_s: how long an end without evidence may stay undecided (a shared file system may be a minute late).
        lost_s: how long a job may stay unknown to a cluster that answers.
    """

    cluster: str
    checkpointed: bool
    ranks: int = 1
    without_progress: int = 3
    unproven: int = 20
    walltime_notice_s: float | None = None
    deadline_s: float | None = None
    evidence_s: float = 60.0
    lost_s: float = 300.0


@dataclass(frozen=True, slots=True)
class Observation:
    """One look at a run.

    Args:
        now_s: epoch seconds.
        job: what the cluster said; None where it answered and does not know the job.
        found: what lies in the attempt's directories; None where nobody looked.
        hopeless: why the job can never start, in words; empty where it can.
    """

    now_s: float
    job: JobSnapshot | None = None
    found: Findings | None = None
    hopeless: str = ""


@dataclass(frozen=True, slots=True)
class Watch:
    """Nothing to do but to look again; `until_s` where not before that time."""

    until_s: float | None = None


@dataclass(frozen=True, slots=True)
class Submit:
    """Submit the next attempt now."""


@dataclass(frozen=True, slots=True)
class StopAttempt:
    """Cancel this attempt's job; what comes next is decided when it has ended."""

    why: str


@dataclass(frozen=True, slots=True)
class Nudge:
    """Ask the cluster to start a job at once that it has put off after a restart."""


@dataclass(frozen=True, slots=True)
class Succeed:
    """The task is done."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The task has failed; `retry` says whether Airflow's retries may be spent on it."""

    cause: EndCause
    message: str
    retry: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel the job, then fail as `failure` says."""

    failure: Fail


Action = Union[Watch, Submit, StopAttempt, Nudge, Succeed, Fail, Cancel]
Step = tuple[Run, Action]


def advance(run: Run, seen: Observation, rules: Rules) -> Step:
    """Decide what to do next from one observation.

    Args:
        run: what is known so far.
        seen: what was seen now.
        rules: what does not change.

    Returns:
        The run to keep, and what to do.
    """
    if rules.deadline_s is not None and seen.now_s >= rules.deadline_s:
        return _past_deadline(run, rules)
    if run.phase is not Phase.WATCHING:
        return run, (Watch(run.not_before_s) if seen.now_s < run.not_before_s else Submit())
    if seen.job is None:
        return _missing(run, seen, rules)
    run = replace(run, missing_since_s=None)
    if seen.job.state.ended:
        return _ended(run, seen.job, seen, rules)
    return _alive(run, seen.job, seen, rules)


def _past_deadline(run: Run, rules: Rules) -> Step:
    failure = Fail(EndCause.DEADLINE, f"{_name(run, rules)}: the task's deadline has passed", retry=False)
    return replace(run, phase=Phase.DONE, outcome="deadline"), Cancel(failure) if run.job_id else failure


def _alive(run: Run, job: JobSnapshot, seen: Observation, rules: Rules) -> Step:
    run = replace(run, ended_since_s=None)
    if not job.detailed:
        return _marked(run, job, seen, rules)
    run = replace(run, restarts=max(run.restarts, job.restarts), granted=job.granted)
    run = replace(run, started_s=run.started_s or job.start_s) if job.state is JobState.RUNNING else run
    if seen.hopeless:
        message = f"{_name(run, rules)} can never start: {seen.hopeless}"
        return replace(run, phase=Phase.DONE, outcome="config"), Cancel(Fail(EndCause.CONFIG, message, retry=False))
    if job.state is JobState.REQUEUED_HELD and not run.stopping:
        why = f"the cluster restarted and then held it ({job.reason or job.raw})"
        return replace(run, stopping=EndCause.DISRUPTED.value), StopAttempt(why)
    if job.state is JobState.REQUEUED and job.reason == "BeginTime":
        return run, Nudge()
    return _marked(run, job, seen, rules)


def _marked(run: Run, job: JobSnapshot, seen: Observation, rules: Rules) -> Step:
    """A job that runs on although all its ranks have noted their end: after a minute the markers decide."""
    if job.state is not JobState.RUNNING or seen.found is None or run.stopping:
        return run, Watch()
    if not all_ended(seen.found, run.submission(rules.ranks)):
        return replace(run, marked_since_s=None), Watch()
    since = seen.now_s if run.marked_since_s is None else run.marked_since_s
    if seen.now_s - since < _MARKED_FOR_S:
        return replace(run, marked_since_s=since), Watch()
    cause = settle_unknown(seen.found, run.submission(rules.ranks)).cause or EndCause.LOST
    why = f"all its ranks ended more than {_MARKED_FOR_S:.0f} s ago, but it is still running"
    return replace(run, stopping=cause.value, marked_since_s=since), StopAttempt(why)


def _missing(run: Run, seen: Observation, rules: Rules) -> Step:
    since = seen.now_s if run.missing_since_s is None else run.missing_since_s
    run = replace(run, missing_since_s=since)
    if seen.found is not None:
        verdict = settle_unknown(seen.found, run.submission(rules.ranks))
        if verdict.cause is not None:
            return _conclude(run, JobSnapshot(run.job_id, JobState.FAILED, end_s=seen.now_s), verdict, seen, rules)
    if seen.now_s - since < rules.lost_s:
        return run, Watch()
    found = seen.found or Findings()
    verdict = replace(settle_unknown(found, run.submission(rules.ranks)), cause=stopped_for(run) or EndCause.LOST)
    return _conclude(run, JobSnapshot(run.job_id, JobState.FAILED, end_s=seen.now_s), verdict, seen, rules)


def _ended(run: Run, job: JobSnapshot, seen: Observation, rules: Rules) -> Step:
    if job.detailed:
        run = replace(run, restarts=max(run.restarts, job.restarts), granted=job.granted)
    since = seen.now_s if run.ended_since_s is None else run.ended_since_s
    run = replace(run, ended_since_s=since)
    if seen.found is None or not job.detailed:
        return run, Watch()
    own = run.submission(rules.ranks, rules.walltime_notice_s)
    verdict = settle(job, seen.found, own)
    if run.stopping and verdict.cause is EndCause.CANCELLED:
        verdict = replace(verdict, cause=stopped_for(run))
    late = seen.now_s - since >= rules.evidence_s
    if not late and _may_still_come(job, seen.found, verdict, all_ranks=all_ended(seen.found, own)):
        return run, Watch()
    if verdict.cause is None:  # "completed" is no evidence of success by itself
        verdict = replace(verdict, cause=EndCause.LAUNCH_FAILED)
    return _conclude(run, job, verdict, seen, rules)


def _may_still_come(job: JobSnapshot, found: Findings, verdict: Verdict, *, all_ranks: bool) -> bool:
    """Whether a marker that is still on its way could change the verdict."""
    if verdict.cause is None:
        return True
    by_exit = job.cause is EndCause.NONZERO_EXIT and verdict.rank is None
    return by_exit and not all_ranks and not found.plain


def _conclude(run: Run, job: JobSnapshot, verdict: Verdict, seen: Observation, rules: Rules) -> Step:
    cause = verdict.cause or EndCause.LOST
    record = Attempt(
        attempt=run.attempt,
        job_id=run.job_id,
        cause=cause.value,
        exit_code=verdict.exit_code,
        submitted_s=run.submitted_s,
        start_s=job.start_s or run.started_s,
        end_s=job.end_s,
        start_step=run.start_step,
        step=verdict.step,
        qos=run.granted.qos,
        partition=run.granted.partition,
        nodes=run.granted.nodes,
        restarts=run.restarts,
    )
    run = recorded(run, record)
    if cause is EndCause.CANCELLED and run.adopted:
        return _next_attempt(run, record, cause, seen.now_s)
    return _RECOVER[RECOVERY[cause]](_Ending(run, job, verdict, cause, record, seen.now_s, rules))


@dataclass(frozen=True, slots=True)
class _Ending:
    run: Run
    job: JobSnapshot
    verdict: Verdict
    cause: EndCause
    record: Attempt
    now_s: float
    rules: Rules


def _succeed(end: _Ending) -> Step:
    return replace(end.run, phase=Phase.DONE, outcome="succeeded"), Succeed()


def _fail(end: _Ending) -> Step:
    return _failed(end, _ended_words(end), retry=True)


def _fail_for_good(end: _Ending) -> Step:
    return _failed(end, _ended_words(end), retry=False)


def _failed(end: _Ending, message: str, *, retry: bool) -> Step:
    return replace(end.run, phase=Phase.DONE, outcome=end.cause.value), Fail(end.cause, message, retry=retry)


def _resume(end: _Ending) -> Step:
    run, rules, newest = end.run, end.rules, end.verdict.step
    if not rules.checkpointed or (end.verdict.visible and not _progressed(end)):
        run = replace(run, without_progress=run.without_progress + 1)
    elif end.verdict.visible:
        run = replace(run, without_progress=0, unproven=0)
    else:
        run = replace(run, unproven=run.unproven + 1)
    run = replace(run, preemptions=run.preemptions + (end.cause is EndCause.PREEMPTED))
    end = replace(end, run=run)
    if run.without_progress > rules.without_progress:
        return _failed(end, f"{_ended_words(end)}. {_no_progress(end, newest)}", retry=False)
    if run.unproven > rules.unproven:
        words = f"resumed {rules.unproven} times in a row without anyone being able to see its checkpoints"
        return _failed(end, f"{_ended_words(end)}. It was {words}: see that Airflow can read the directory", retry=False)
    return _next_attempt(run, end.record, end.cause, end.now_s)


def _resume_if_progress(end: _Ending) -> Step:
    if not end.rules.checkpointed:
        return _failed(end, f"{_ended_words(end)}. Ask for more walltime, or do less in one task", retry=True)
    if end.verdict.visible and not _progressed(end):
        step = "there was no checkpoint" if end.verdict.step is None else f"the newest is of step {end.verdict.step}"
        words = f"{_ended_words(end)}. It wrote no newer checkpoint in that time ({step}), so another run would end alike"
        return _failed(end, f"{words}: checkpoint more often, or ask for more walltime", retry=False)
    return _resume(end)


_RECOVER: dict[Recovery, Callable[[_Ending], Step]] = {
    Recovery.SUCCEED: _succeed,
    Recovery.FAIL: _fail,
    Recovery.FAIL_FOR_GOOD: _fail_for_good,
    Recovery.RESUME: _resume,
    Recovery.RESUME_IF_PROGRESS: _resume_if_progress,
}


def _next_attempt(run: Run, ended: Attempt, cause: EndCause, now_s: float) -> Step:
    ran_s = (ended.end_s or now_s) - (ended.start_s or ended.end_s or now_s)
    unlucky = cause in _BY_ITS_NODE and ran_s < _UNLUCKY_WITHIN_S
    run = replace(run, unlucky=run.unlucky + 1 if unlucky else 0, fence=cause in (EndCause.NODE_FAIL, EndCause.LOST))
    if not unlucky:
        return waiting(run, now_s), Submit()
    # A bracketed list names several nodes: none of them is known to be the bad one.
    if ended.nodes and ended.nodes not in run.excluded and not set(ended.nodes) & set("[,"):
        run = replace(run, excluded=(*run.excluded, ended.nodes)[-_MOST_EXCLUDED:])
    until_s = now_s + min(_DELAY_S * 2 ** (run.unlucky - 1), _LONGEST_DELAY_S)
    return waiting(run, until_s), Watch(until_s)


def _progressed(end: _Ending) -> bool:
    newest, before = end.verdict.step, end.run.start_step
    return newest is not None and (before is None or newest > before)


def _no_progress(end: _Ending, newest: int | None) -> str:
    times = end.rules.without_progress
    if not end.rules.checkpointed:
        return f"It has been started again {times} times, the budget (without_progress) for a task without checkpoints"
    where = "there is no checkpoint" if newest is None else f"the newest is still of step {newest}"
    return f"It was resumed {times} times in a row without a newer checkpoint ({where}): the budget (without_progress) is spent"


def _name(run: Run, rules: Rules) -> str:
    return f"job {run.job_id or '(not submitted)'} of {run.key.name} on {rules.cluster}"


_WORDS: dict[EndCause, str] = {
    EndCause.NONZERO_EXIT: "failed",
    EndCause.OUT_OF_MEMORY: "ran out of memory",
    EndCause.TIMEOUT: "reached its walltime limit",
    EndCause.DEADLINE: "missed its deadline on the cluster",
    EndCause.CANCELLED: "was cancelled on the cluster",
    EndCause.PREEMPTED: "was preempted",
    EndCause.NODE_FAIL: "lost its node",
    EndCause.LOST: "is not known to the cluster any more, and left nothing that tells how it ended",
    EndCause.LAUNCH_FAILED: "ended without a sign that its program had run",
    EndCause.CHECKPOINTED: "saved and left to be run again",
}


def _ended_words(end: _Ending) -> str:
    words = [f"{_name(end.run, end.rules)} {_WORDS.get(end.cause, end.cause.value.replace('_', ' '))}"]
    if end.cause is EndCause.CANCELLED and end.job.cancelled_by:
        words.append(f"by {end.job.cancelled_by}")
    if end.cause in (EndCause.NONZERO_EXIT, EndCause.LAUNCH_FAILED) and end.verdict.exit_code is not None:
        words.append(f"with exit code {end.verdict.exit_code}")
        if end.verdict.rank is not None and end.rules.ranks > 1:
            words.append(f"on rank {end.verdict.rank}")
    if end.run.granted.nodes:
        words.append(f"(node {end.run.granted.nodes})")
    return " ".join(words)
