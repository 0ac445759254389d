"""The machine of preemption and resume.

Rule 1: every decision about another attempt is here. Rule 2: it knows no cluster and no Airflow.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from airflow_profsched.core.evidence import (
    Findings,
    Submission,
    Verdict,
    all_ended,
    may_still_come,
    settle,
    settle_unknown,
)
from airflow_profsched.core.jobs import EndCause, JobSnapshot, JobState, Words
from airflow_profsched.core.run import Attempt, Phase, Run, recorded, stopped_for, waiting

if TYPE_CHECKING:
    from collections.abc import Callable


class Recovery(Words):
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

_RESUMED = (Recovery.RESUME, Recovery.RESUME_IF_PROGRESS)
_BY_ITS_NODE = (EndCause.NODE_FAIL, EndCause.BOOT_FAIL, EndCause.LAUNCH_FAILED)
_MAY_HAVE_ENDED = (JobState.RUNNING, JobState.UNDETERMINED)
_UNLUCKY_WITHIN_S = 60.0
_DELAY_S, _LONGEST_DELAY_S, _DOUBLINGS = 5.0, 600.0, 7
_MARKED_FOR_S = 60.0
_MOST_EXCLUDED = 16
_YEAR_10000_S = 253402300800.0


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


Action = Watch | Submit | StopAttempt | Nudge | Succeed | Fail | Cancel
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
    if run.phase is Phase.DONE:
        return run, _outcome(run, rules)
    after, action = _observed(run, seen, rules)
    if rules.deadline_s is None or seen.now_s < rules.deadline_s or isinstance(action, (Succeed, Fail)):
        return after, action  # an end that came before the deadline counts, even where it is seen after it
    return _past_deadline(run, rules)


def _outcome(run: Run, rules: Rules) -> Action:
    if run.outcome == "succeeded":
        return Succeed()
    return Fail(EndCause(run.outcome), f"{_name(run, rules)} has ended before: {run.outcome}", retry=False)


def _observed(run: Run, seen: Observation, rules: Rules) -> Step:
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
    run = replace(run, started_s=job.start_s or run.started_s) if job.state is JobState.RUNNING else run
    if seen.hopeless and not run.stopping:
        return _hopeless(run, seen, rules)
    if job.state is JobState.REQUEUED_HELD and not run.stopping:
        why = f"the cluster restarted and then held it ({job.reason or job.raw})"
        return replace(run, stopping=EndCause.DISRUPTED.value), StopAttempt(why)
    if job.state is JobState.REQUEUED and job.reason == "BeginTime":
        return run, Nudge()
    return _marked(run, job, seen, rules)


def _hopeless(run: Run, seen: Observation, rules: Rules) -> Step:
    if run.excluded:  # perhaps only because of the nodes that we keep it away from
        why = f"it can never start without {', '.join(run.excluded)} ({seen.hopeless})"
        return replace(run, stopping=EndCause.DISRUPTED.value, excluded=()), StopAttempt(why)
    message = f"{_name(run, rules)} can never start: {seen.hopeless}"
    return replace(run, phase=Phase.DONE, outcome="config"), Cancel(Fail(EndCause.CONFIG, message, retry=False))


def _marked(run: Run, job: JobSnapshot, seen: Observation, rules: Rules) -> Step:
    """A job that goes on although all its ranks have noted their end: after a minute the markers decide."""
    own = run.submission(rules.ranks, rules.walltime_notice_s)
    if job.state not in _MAY_HAVE_ENDED or (seen.found is not None and not all_ended(seen.found, own)):
        return replace(run, marked_since_s=None), Watch()
    if seen.found is None:
        return run, Watch()
    since = seen.now_s if run.marked_since_s is None else run.marked_since_s
    run = replace(run, marked_since_s=since)
    # Only details tell whether it has been started again meanwhile, and the markers are of the start before.
    if not job.detailed or seen.now_s - since < _MARKED_FOR_S:
        return run, Watch()
    last = replace(job, start_s=job.start_s or run.started_s)
    verdict = settle_unknown(last, seen.found, own)
    cause = verdict.cause or EndCause.LOST
    if not run.stopping:
        why = f"all its ranks ended more than {_MARKED_FOR_S:.0f} s ago, but the cluster says {job.raw or job.state}"
        return replace(run, stopping=cause.value), StopAttempt(why)
    if seen.now_s - since < _MARKED_FOR_S + rules.lost_s or RECOVERY[cause] in _RESUMED:
        return run, Watch()  # another attempt has to wait until this job is gone; an end of the task has not
    return _conclude(run, replace(last, end_s=seen.now_s), verdict, seen, rules)


def _missing(run: Run, seen: Observation, rules: Rules) -> Step:
    since = seen.now_s if run.missing_since_s is None else run.missing_since_s
    run = replace(run, missing_since_s=since)
    last = JobSnapshot(run.job_id, JobState.UNDETERMINED, start_s=run.started_s, end_s=seen.now_s, granted=run.granted)
    own = run.submission(rules.ranks, rules.walltime_notice_s)
    verdict = settle_unknown(last, seen.found or Findings(), own)
    if verdict.cause is None:
        if seen.now_s - since < rules.lost_s:
            return run, Watch()
        verdict = replace(verdict, cause=stopped_for(run) or EndCause.LOST)
    return _conclude(run, last, verdict, seen, rules)


def _ended(run: Run, job: JobSnapshot, seen: Observation, rules: Rules) -> Step:
    if job.detailed:
        granted = replace(job.granted, nodes=job.granted.nodes or run.granted.nodes)
        run = replace(run, restarts=max(run.restarts, job.restarts), granted=granted)
    since = seen.now_s if run.ended_since_s is None else run.ended_since_s
    run = replace(run, ended_since_s=since)
    if seen.found is None or not job.detailed:
        return run, Watch()
    own = run.submission(rules.ranks, rules.walltime_notice_s)
    late = seen.now_s - since >= rules.evidence_s
    if not late and (not job.complete or may_still_come(job, seen.found, own)):
        return run, Watch()
    verdict = settle(job, seen.found, own)
    if verdict.cause is None:  # "completed" is no evidence of success by itself
        verdict = replace(verdict, cause=EndCause.LAUNCH_FAILED)
    elif verdict.cause is EndCause.CANCELLED and run.stopping:
        verdict = _stopped(run, job, seen.found, own)
    after, action = _conclude(run, job, verdict, seen, rules)
    if isinstance(action, Fail) and not late and _progress_may_come(verdict, seen.found, own, rules):
        return run, Watch()
    return after, action


def _stopped(run: Run, job: JobSnapshot, found: Findings, own: Submission) -> Verdict:
    """The end of a job that we cancelled ourselves: what we cancelled it for, with the markers' details."""
    verdict = settle_unknown(job, found, own)
    cause = stopped_for(run)
    return verdict if verdict.cause is cause else replace(verdict, cause=cause, exit_code=None, rank=None)


def _progress_may_come(verdict: Verdict, found: Findings, own: Submission, rules: Rules) -> bool:
    """Whether a marker on its way could still tell of a newer checkpoint, before a lack of progress fails the task."""
    resumed = verdict.cause is not None and RECOVERY[verdict.cause] in _RESUMED
    return resumed and rules.checkpointed and not all_ended(found, own)


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
        start_step=verdict.start_step if run.start_step is None else run.start_step,
        step=verdict.step,
        qos=run.granted.qos,
        partition=run.granted.partition,
        nodes=run.granted.nodes,
        restarts=run.restarts,
    )
    end = _Ending(recorded(run, record), job, verdict, cause, record, seen.now_s, rules)
    if cause is EndCause.CANCELLED and run.adopted and job.cancel_marked:
        return _next_attempt(end)  # a clear cancels the job of the try before, which the next try may have adopted
    return _RECOVER[RECOVERY[cause]](end)


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
        words = f"{_ended_words(end)}. It was {words}: see that Airflow can read the directory"
        return _failed(end, words, retry=False)
    return _next_attempt(end)


def _resume_if_progress(end: _Ending) -> Step:
    if not end.rules.checkpointed:
        return _failed(end, f"{_ended_words(end)}. Ask for more walltime, or do less in one task", retry=True)
    if end.verdict.visible and not _progressed(end):
        step = "there was no checkpoint" if end.verdict.step is None else f"the newest is of step {end.verdict.step}"
        words = f"{_ended_words(end)}. It wrote no newer checkpoint in that time ({step}), so another would end alike"
        return _failed(end, f"{words}: checkpoint more often, or ask for more walltime", retry=False)
    return _resume(end)


_RECOVER: dict[Recovery, Callable[[_Ending], Step]] = {
    Recovery.SUCCEED: _succeed,
    Recovery.FAIL: _fail,
    Recovery.FAIL_FOR_GOOD: _fail_for_good,
    Recovery.RESUME: _resume,
    Recovery.RESUME_IF_PROGRESS: _resume_if_progress,
}


def _next_attempt(end: _Ending) -> Step:
    run, ended, now_s = end.run, end.record, end.now_s
    ran_s = (ended.end_s or now_s) - (ended.start_s or ended.end_s or now_s)
    run = replace(run, fence=end.cause in (EndCause.NODE_FAIL, EndCause.LOST))
    if end.cause not in _BY_ITS_NODE or ran_s >= _UNLUCKY_WITHIN_S:
        return waiting(replace(run, unlucky=0, excluded=()), now_s), Submit()
    run = replace(run, unlucky=run.unlucky + 1)
    # A bracketed list names several nodes: none of them is known to be the bad one.
    if ended.nodes and ended.nodes not in run.excluded and not set(ended.nodes) & set("[,"):
        run = replace(run, excluded=(*run.excluded, ended.nodes)[-_MOST_EXCLUDED:])
    until_s = now_s + min(_DELAY_S * 2 ** min(run.unlucky - 1, _DOUBLINGS), _LONGEST_DELAY_S)
    if end.rules.deadline_s is not None:
        until_s = min(until_s, max(now_s, end.rules.deadline_s))
    return waiting(run, until_s), Watch(until_s)


def _progressed(end: _Ending) -> bool:
    newest, before = end.verdict.step, _step_before(end)
    return newest is not None and (before is None or newest > before)


def _step_before(end: _Ending) -> int | None:
    """The step it started from, as Airflow saw it, else as the job saw it, else where the attempt before ended.

    Airflow may have seen none only because it could not see: then everything would be progress, for ever.
    """
    earlier = end.run.history[-2].step if len(end.run.history) > 1 else None
    known = (end.run.start_step, end.verdict.start_step, earlier)
    return next((step for step in known if step is not None), None)


def _no_progress(end: _Ending, newest: int | None) -> str:
    times = end.rules.without_progress
    if not end.rules.checkpointed:
        return f"It has been started again {times} times, the budget (without_progress) for a task without checkpoints"
    where = "there is no checkpoint" if newest is None else f"the newest is still of step {newest}"
    words = f"It was resumed {times} times in a row without a newer checkpoint ({where})"
    return f"{words}: the budget (without_progress) is spent"


def _name(run: Run, rules: Rules) -> str:
    return f"job {run.job_id or '(not submitted)'} of {run.key.name} on {rules.cluster}"


_WORDS: dict[EndCause, str] = {
    EndCause.NONZERO_EXIT: "failed",
    EndCause.OUT_OF_MEMORY: "ran out of memory",
    EndCause.TIMEOUT: "reached its walltime limit",
    EndCause.DEADLINE: "missed its deadline on the cluster",
    EndCause.CANCELLED: "was cancelled on the cluster",
    EndCause.PREEMPTED: "was preempted",
    EndCause.DISRUPTED: "was ended by the cluster through no fault of its own",
    EndCause.BOOT_FAIL: "got a node that did not boot",
    EndCause.NODE_FAIL: "lost its node",
    EndCause.LOST: "is not known to the cluster any more, and left nothing that tells how it ended",
    EndCause.LAUNCH_FAILED: "ended without a sign that its program had run",
    EndCause.CHECKPOINTED: "saved and left to be run again",
}


def _ended_words(end: _Ending) -> str:
    words = [f"{_name(end.run, end.rules)} {_WORDS.get(end.cause, end.cause.value.replace('_', ' '))}"]
    if end.cause is EndCause.CANCELLED:
        words += [f"by {end.job.cancelled_by}"] if end.job.cancelled_by else []
        words += [f"at {_utc(end.job.end_s)}"] if end.job.end_s is not None else []
    if end.cause in (EndCause.NONZERO_EXIT, EndCause.LAUNCH_FAILED) and end.verdict.exit_code is not None:
        words.append(f"with exit code {end.verdict.exit_code}")
        if end.verdict.rank is not None and end.rules.ranks > 1:
            words.append(f"on rank {end.verdict.rank}")
    if end.run.granted.nodes:
        words.append(f"(node {end.run.granted.nodes})")
    if end.cause in (EndCause.LAUNCH_FAILED, EndCause.LOST):  # perhaps it left what we did not believe
        words += [f"[{strange}]" for strange in end.verdict.strange[:3]]
    return " ".join(words)


def _utc(moment_s: float) -> str:
    if not 0 <= moment_s < _YEAR_10000_S:  # what a cluster says may be anything
        return f"{moment_s:.0f} s after 1970"
    return datetime.fromtimestamp(moment_s, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
