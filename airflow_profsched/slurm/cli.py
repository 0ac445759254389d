"""Slurm by its commands: what each verb asks, and what its answer means. Nothing here sends anything."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from airflow_profsched.cluster.exchange import Command, Exchange, Reply
from airflow_profsched.core.errors import ClusterUnavailableError, LostReplyError, SubmitError, SubmitLimitError
from airflow_profsched.core.jobs import EndCause, FoundJob, JobRef, JobSnapshot, JobState
from airflow_profsched.slurm import records
from airflow_profsched.slurm.records import Record
from airflow_profsched.slurm.replies import checked, said, unanswered

ONLY_STATE_SINCE = (24, 11)
"""The first release on which `squeue --only-job-state` was measured; 22.05 has none."""

IDS_PER_COMMAND = 1000
_CLOCKS_S = 120.0
_AFTER_RESTART_S = 3
_ANSWER = re.compile(r"([0-9]+)(?:;[\w.-]+)?")
_NEVER_SENT = re.compile(
    r"\(connect failure\)|connection refused|in standby mode|temporarily unable to accept", re.IGNORECASE
)
_LIMIT = re.compile("MaxSubmit|MaxJobCount", re.IGNORECASE)
_SOME_LIMIT = re.compile("job submit limit", re.IGNORECASE)
_NAMED_LIMIT = re.compile(r"\b(?:QOS|Assoc)(?:Max|Min|Grp)\w+")
_UNKNOWN_JOB = re.compile("invalid job id|job/step already completing or completed|already finished", re.IGNORECASE)
_LIVE = "PENDING,RUNNING,SUSPENDED,COMPLETING,CONFIGURING,STAGE_OUT,SIGNALING,STOPPED,RESIZING,REQUEUED,REQUEUE_HOLD,SPECIAL_EXIT"
_LIVING = frozenset(JobState) - {JobState.DONE, JobState.FAILED, JobState.UNDETERMINED}
_SQUEUE = ("squeue", "--noheader", "--states=all")


def submit(script: str, name: str, nonce: str) -> Exchange[str]:
    """Submit once. A lost answer is looked up by the nonce in the job's comment.

    Args:
        script: the batch script.
        name: the job's name.
        nonce: the submission's nonce.

    Returns:
        The job's id.

    Raises:
        SubmitLimitError: refused for now.
        SubmitError: refused.
        LostReplyError: no answer, and no such job, or nobody to ask about it: it may still come.
        ClusterUnavailableError: the controller could not be reached; nothing was submitted.
    """
    command = Command(("sbatch", "--parsable"), stdin=script, idempotent=False)
    try:
        reply = yield command
    except LostReplyError as error:
        return (yield from _look_up(name, nonce, error))
    lines = [line.strip() for line in reply.out.splitlines() if line.strip()]
    answer = _ANSWER.fullmatch(lines[-1]) if lines else None
    if not reply.code and answer:
        return answer.group(1)
    if not reply.code or (unanswered(reply) and not _NEVER_SENT.search(reply.err)):
        lost = LostReplyError(f"sbatch ended with {reply.code} and named no job: {said(reply)}")
        return (yield from _look_up(name, nonce, lost))
    if unanswered(reply):
        checked(reply, command)
    refused = SubmitLimitError if _for_now(reply.err) else SubmitError
    raise refused(said(reply).replace("sbatch: error: ", ""))


def _for_now(err: str) -> bool:
    """Whether waiting helps. Slurm names the limit before a sentence that is the same for all of them (DenyOnLimit too)."""
    if _LIMIT.search(err):
        return True
    return _SOME_LIMIT.search(err) is not None and not _NAMED_LIMIT.search(err)


def _look_up(name: str, nonce: str, lost: LostReplyError) -> Exchange[str]:
    """Find the job of a lost answer; it may have ended already."""
    try:
        jobs = yield from _named(name, "all")
    except ClusterUnavailableError as error:  # "nothing was submitted" is more than anybody knows
        raise LostReplyError(f"{lost}; {error}") from error
    for job in jobs:
        if job.nonce == nonce:
            return job.job_id
    raise lost


def find(name: str) -> Exchange[tuple[FoundJob, ...]]:
    """Find the live jobs of a task instance.

    Args:
        name: the jobs' name.

    Returns:
        Newest first.
    """
    found = yield from _named(name, _LIVE)
    return tuple(job for job in found if not job.state.ended)


def _named(name: str, states: str) -> Exchange[tuple[FoundJob, ...]]:
    fields = records.squeue_format(records.FIND_FIELDS)
    command = Command(("squeue", "--noheader", "--me", f"--states={states}", f"--name={name}", f"--Format={fields}"))
    out = checked((yield command), command)
    return tuple(job for job in records.found_jobs(out) if job.name == name)


def ours() -> Exchange[tuple[FoundJob, ...]]:
    """Find every live job that this package has submitted as this user.

    Returns:
        Newest first.
    """
    fields = records.squeue_format(records.FIND_FIELDS)
    command = Command(("squeue", "--noheader", "--me", f"--states={_LIVE}", f"--Format={fields}"))
    found = records.found_jobs(checked((yield command), command))
    return tuple(job for job in found if job.attempt is not None and not job.state.ended)


# ------------------------------------------------------------------------------------------------ query


def query(
    refs: Collection[JobRef], details: Collection[JobRef], *, release: tuple[int, ...], accounting: bool
) -> Exchange[dict[str, JobSnapshot]]:
    """Ask about many jobs at once: the cheap form where the release has it, details where they may matter.

    Args:
        refs: the jobs.
        details: those of them whose details are wanted in any case.
        release: Slurm's.
        accounting: whether there is accounting to ask about jobs that the controller does not know any more.

    Returns:
        Snapshots by id; a job that is absent is known to neither.

    Raises:
        ClusterUnavailableError: the controller did not answer; or accounting did not, and there is nothing else to say.
    """
    found: dict[str, JobSnapshot] = {}
    detailed = {ref.job_id: ref for ref in details}
    cheap = [ref for ref in refs if ref.job_id not in detailed] if release >= ONLY_STATE_SINCE else []
    if cheap:
        found = yield from _states(cheap)
        detailed |= {ref.job_id: ref for ref in cheap if _worth_a_look(found.get(ref.job_id))}
    else:
        detailed = {ref.job_id: ref for ref in refs}
    found |= yield from _details(tuple(detailed.values()))
    missing = [ref for ref in refs if not _settled(found.get(ref.job_id))]
    if accounting:  # it alone knows who cancelled a job, and hears of it a moment after the controller
        cancelled = {job_id: seen for job_id, seen in found.items() if seen.cause is EndCause.CANCELLED}
        found |= {job_id: replace(seen, complete=False) for job_id, seen in cancelled.items()}
    for ref in missing:
        if ref.job_id in found and not found[ref.job_id].detailed:
            del found[ref.job_id]
    if accounting and missing:
        found = yield from _with_accounting(found, missing)
    return found


def _worth_a_look(seen: JobSnapshot | None) -> bool:
    return seen is None or seen.state is not JobState.RUNNING or seen.raw != "RUNNING"


def _settled(seen: JobSnapshot | None) -> bool:
    """Whether accounting has nothing to add: it alone knows who cancelled a job."""
    if seen is None or (seen.state.ended and not seen.detailed):
        return False
    return seen.cause is not EndCause.CANCELLED


def _with_accounting(found: dict[str, JobSnapshot], missing: Sequence[JobRef]) -> Exchange[dict[str, JobSnapshot]]:
    """Ask accounting; where it is silent, what the controller said of the others still counts."""
    try:
        accounted = yield from _accounted(missing)
    except ClusterUnavailableError as error:
        if not found:
            raise
        unknown = {ref.job_id for ref in missing} - found.keys()
        return found | {
            job_id: JobSnapshot(job_id, JobState.UNDETERMINED, raw=f"not in the queue; {error}", detailed=False)
            for job_id in unknown
        }
    return _completed(found, accounted)


def _chunks(refs: Sequence[JobRef]) -> Iterator[Sequence[JobRef]]:
    for start in range(0, len(refs), IDS_PER_COMMAND):
        yield refs[start : start + IDS_PER_COMMAND]


def _ids(refs: Collection[JobRef]) -> str:
    return ",".join(sorted({ref.job_id for ref in refs}, key=int))


def _states(refs: Sequence[JobRef]) -> Exchange[dict[str, JobSnapshot]]:
    found: dict[str, JobSnapshot] = {}
    for some in _chunks(refs):
        command = Command((*_SQUEUE, "--only-job-state", f"--jobs={_ids(some)}", "--format=%A|%T"))
        reply = yield command
        if not _knows_none(reply):
            found |= records.state_records(checked(reply, command))
    return found


def _details(refs: Sequence[JobRef]) -> Exchange[dict[str, JobSnapshot]]:
    found: dict[str, JobSnapshot] = {}
    fields = records.squeue_format(records.SQUEUE_FIELDS)
    for some in _chunks(refs):
        command = Command((*_SQUEUE, f"--jobs={_ids(some)}", f"--Format={fields}"))
        reply = yield command
        if not _knows_none(reply):
            shown = {record.snapshot.job_id: record for record in records.squeue_records(checked(reply, command))}
            found |= _own(some, shown.get)
    return found


def _knows_none(reply: Reply) -> bool:
    """`squeue -j` of ids that are all unknown is an error; of some known ones it is not."""
    return bool(reply.code) and "invalid job id" in reply.err.lower() and not unanswered(reply)


def _accounted(refs: Sequence[JobRef]) -> Exchange[dict[str, JobSnapshot]]:
    found: dict[str, JobSnapshot] = {}
    fields = ",".join(records.SACCT_FIELDS)
    for some in _chunks(refs):
        asked = f"--jobs={_ids(some)}"
        command = Command(
            ("sacct", "--duplicates", "--allocations", "--noheader", "--parsable2", asked, f"--format={fields}")
        )
        found |= _own(some, records.sacct_records(checked((yield command), command)).get)
    return found


def _own(refs: Collection[JobRef], record_of: Callable[[str], Record | None]) -> dict[str, JobSnapshot]:
    """Keep the records that are ours: ids are reused, so name, user and time must agree as well."""
    found = {}
    for ref in refs:
        record = record_of(ref.job_id)
        if record is not None and _is(record, ref):
            found[ref.job_id] = record.snapshot
    return found


def _is(record: Record, ref: JobRef) -> bool:
    if record.name != ref.name or (ref.user and record.user != ref.user):
        return False
    submit_s = record.snapshot.submit_s
    return submit_s is None or submit_s >= ref.submitted_s - _CLOCKS_S


def _completed(found: dict[str, JobSnapshot], accounted: dict[str, JobSnapshot]) -> dict[str, JobSnapshot]:
    """Add what accounting knows; where the controller knows a job as well, only who cancelled it."""
    for job_id, row in accounted.items():
        seen = found.get(job_id)
        if seen is None and row.state in _LIVING:
            continue  # the controller does not know it: its end has not come there yet, or never will
        if seen is None:
            found[job_id] = row
        elif row.cause is EndCause.CANCELLED:
            found[job_id] = replace(seen, cancelled_by=row.cancelled_by, complete=True)
    return found


# ------------------------------------------------------------------------------------------------ acts


def cancel(job_id: str) -> Exchange[None]:
    """Cancel a job, and leave a mark in its comment that we asked for it.

    Args:
        job_id: the job; one that has ended, or is not known, is no error.

    Raises:
        ClusterError: Slurm refused.
        ClusterUnavailableError: no answer; the job may run on.
    """
    # The mark is a copy for people and for the next try; where it cannot be written the job is cancelled all the same.
    with contextlib.suppress(ClusterUnavailableError):
        yield from _mark(job_id)
    command = Command(("scancel", job_id))
    reply = yield command
    if reply.code and not _UNKNOWN_JOB.search(reply.err):
        checked(reply, command)


def _mark(job_id: str) -> Exchange[None]:
    reply = yield Command(("squeue", "--noheader", f"--jobs={job_id}", "--Format=Comment:|"))
    comment = reply.out.strip().removesuffix("|") if not reply.code else ""
    if comment.startswith(records.COMMENT) and not comment.endswith(records.CANCELLED):
        yield Command(("scontrol", "update", f"jobid={job_id}", f"comment={comment}{records.CANCELLED}"))


def nudge(job_id: str) -> Exchange[None]:
    """Let a job start that Slurm has put off for two minutes after a restart.

    Not in the second of the restart: its credential would be taken for the revoked one of the run before, and the job
    ends FAILED (measured on 22.05). The moment is absolute, so asking again never puts it off.

    Args:
        job_id: the job.
    """
    command = Command((*_SQUEUE, f"--jobs={job_id}", "--Format=SubmitTime:|"))
    reply = yield command
    restarted_s = None if _knows_none(reply) else records.moment(checked(reply, command).strip().removesuffix("|"))
    if restarted_s is None:
        return
    start = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(restarted_s + _AFTER_RESTART_S))
    command = Command(("scontrol", "update", f"jobid={job_id}", f"StartTime={start}"), env=(("TZ", "UTC0"),))
    reply = yield command
    if reply.code and unanswered(reply):
        checked(reply, command)
