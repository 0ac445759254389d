"""What squeue and sacct print, column by column, and how it is read."""

from __future__ import annotations

import pwd
from dataclasses import dataclass, replace

from airflow_profsched.core import units
from airflow_profsched.core.jobs import EndCause, FoundJob, Granted, JobSnapshot, JobState
from airflow_profsched.slurm import reasons, states

# What people write comes last: a comment or a foreign job's name may hold anything, the separator too.
SQUEUE_FIELDS = (
    "JobID", "UserName", "State", "RestartCnt", "PreemptTime", "SubmitTime", "StartTime", "EndTime",
    "TimeLimit", "QOS", "Partition", "NodeList", "exit_code", "Reason", "Name", "Comment",
)  # fmt: skip
SACCT_FIELDS = (
    "JobIDRaw", "User", "State", "ExitCode", "Submit", "Start", "End",
    "Timelimit", "QOS", "Partition", "NodeList", "Reason", "JobName",
)  # fmt: skip
FIND_FIELDS = ("JobID", "UserName", "State", "RestartCnt", "SubmitTime", "Reason", "Name", "Comment")

COMMENT = "profsched:1:"
CANCELLED = ":cancelled"
_YEAR_10000_S = 253402300800


@dataclass(frozen=True, slots=True)
class Record:
    """A job as one of the commands showed it, and what tells it from another of the same id."""

    snapshot: JobSnapshot
    name: str
    user: str


def squeue_format(fields: tuple[str, ...]) -> str:
    """Return the format that prints fields with a bar behind each, at any length."""
    return ",".join(f"{name}:|" for name in fields)


def squeue_records(out: str) -> list[Record]:
    """Read lines of squeue in :data:`SQUEUE_FIELDS`.

    Args:
        out: its output; lines that do not fit (banners) are passed over.

    Returns:
        The jobs.
    """
    return [_from_squeue(row) for row in _rows(out, SQUEUE_FIELDS)]


def _rows(out: str, fields: tuple[str, ...]) -> list[dict[str, str]]:
    rows = []
    for line in out.splitlines():
        parts = line.strip("\n").split("|", len(fields) - 1)
        if len(parts) == len(fields) and _whole(parts[0].strip()) is not None:
            values = [part.strip() for part in parts]
            values[-1] = values[-1].removesuffix("|")
            rows.append(dict(zip(fields, values, strict=True)))
    return rows


def _from_squeue(row: dict[str, str]) -> Record:
    read = states.parse(row["State"])
    restarts = _whole(row["RestartCnt"]) or 0
    state = reasons.waiting_state(read.state, row["Reason"], restarts)
    preempt_s = moment(row["PreemptTime"])
    started = state not in (JobState.QUEUED, JobState.QUEUED_HELD, JobState.REQUEUED, JobState.REQUEUED_HELD)
    code, signal = _exit(row["exit_code"])
    snapshot = JobSnapshot(
        job_id=row["JobID"],
        state=state,
        cause=EndCause.PREEMPTED if state.ended and preempt_s is not None else read.cause,
        exit_code=code,
        signal=signal,
        restarts=restarts,
        reason="" if row["Reason"] == "None" else row["Reason"],
        submit_s=moment(row["SubmitTime"]),
        start_s=moment(row["StartTime"]) if started else None,  # for a waiting job it is a guess
        end_s=moment(row["EndTime"]) if state.ended else None,
        preempt_s=preempt_s,
        granted=Granted(_text(row["QOS"]), _text(row["Partition"]), _limit(row["TimeLimit"]), _text(row["NodeList"])),
        raw=row["State"],
        cancel_marked=row["Comment"].startswith(COMMENT) and row["Comment"].endswith(CANCELLED),
    )
    return Record(snapshot, row["Name"], row["UserName"])


def sacct_records(out: str) -> dict[str, Record]:
    """Read lines of `sacct -D -X` in :data:`SACCT_FIELDS`.

    Args:
        out: its output, one row per run of a job, oldest first.

    Returns:
        The newest run of each job, with its restarts.
    """
    found: dict[str, Record] = {}
    for row in _rows(out, SACCT_FIELDS):
        record = _from_sacct(row)
        before = found.get(record.snapshot.job_id)
        if before is not None and (before.name, before.user) == (record.name, record.user):
            restarts = before.snapshot.restarts + 1
            record = replace(record, snapshot=replace(record.snapshot, restarts=restarts))
        found[record.snapshot.job_id] = record
    return found


def _from_sacct(row: dict[str, str]) -> Record:
    read = states.parse(row["State"])
    code, signal = _exit(row["ExitCode"])
    snapshot = JobSnapshot(
        job_id=row["JobIDRaw"],
        state=read.state,
        cause=read.cause,
        exit_code=code,
        signal=signal,
        reason="" if row["Reason"] == "None" else row["Reason"],
        submit_s=moment(row["Submit"]),
        start_s=moment(row["Start"]),
        end_s=moment(row["End"]) if read.state.ended else None,
        cancelled_by=user_name(read.cancelled_by),
        granted=Granted(_text(row["QOS"]), _text(row["Partition"]), _limit(row["Timelimit"]), _text(row["NodeList"])),
        raw=row["State"],
    )
    return Record(snapshot, row["JobName"], row["User"])


def state_records(out: str) -> dict[str, JobSnapshot]:
    """Read lines of `squeue --only-job-state` in `%A|%T`: a state, and nothing else that is true.

    Args:
        out: its output.

    Returns:
        Snapshots without details.
    """
    found = {}
    for row in _rows(out, ("JobID", "State")):
        read = states.parse(row["State"])
        found[row["JobID"]] = JobSnapshot(row["JobID"], read.state, read.cause, raw=row["State"], detailed=False)
    return found


def found_jobs(out: str) -> tuple[FoundJob, ...]:
    """Read lines of squeue in :data:`FIND_FIELDS`.

    Args:
        out: its output.

    Returns:
        The jobs, newest first.
    """
    found = [_found(row) for row in _rows(out, FIND_FIELDS)]
    return tuple(sorted(found, key=lambda job: (job.submit_s or 0, int(job.job_id)), reverse=True))


def _found(row: dict[str, str]) -> FoundJob:
    restarts = _whole(row["RestartCnt"]) or 0
    said = row["Comment"].removeprefix(COMMENT).split(":") if row["Comment"].startswith(COMMENT) else []
    attempt, nonce, profile = (said[0], said[1], said[3]) if len(said) > 3 else ("", "", "")  # noqa: PLR2004
    return FoundJob(
        job_id=row["JobID"],
        name=row["Name"],
        state=reasons.waiting_state(states.parse(row["State"]).state, row["Reason"], restarts),
        attempt=_whole(attempt),
        nonce=nonce,
        submit_s=moment(row["SubmitTime"]),
        profile=profile,
        cancelled=row["Comment"].endswith(CANCELLED),
        user=row["UserName"],
    )


def comment(attempt: int, nonce: str, try_number: int, profile: str) -> str:
    """Write a job's comment: a copy of what our own record says, for a search by name and for people."""
    return f"{COMMENT}{attempt}:{nonce}:{try_number}:{profile}"


def user_name(uid: str) -> str:
    """Return a user's name where this host knows it."""
    if not uid.isdecimal():
        return uid
    try:
        return f"{pwd.getpwuid(int(uid)).pw_name} (uid {uid})"
    except (KeyError, OverflowError):
        return f"uid {uid}"


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) < 19 else None  # noqa: PLR2004 - fits 64 bits


def moment(text: str) -> float | None:
    """Read epoch seconds: the sender sets SLURM_TIME_FORMAT=%s, so that no time zone has to be guessed.

    Args:
        text: a column; `N/A`, words, and times after the year 9999 are none.

    Returns:
        Epoch seconds; None where there is no time.
    """
    number = _whole(text) or _YEAR_10000_S
    return float(number) if number < _YEAR_10000_S else None


def _text(text: str) -> str:
    return "" if text in ("N/A", "(null)", "None assigned") else text


def _limit(text: str) -> int | None:
    try:
        return units.seconds(text)
    except ValueError:  # UNLIMITED, Partition_Limit, NOT_SET
        return None


def _exit(text: str) -> tuple[int | None, int | None]:
    """Squeue prints a wait status or `code:signal`, sacct `code:signal`; a signal counts as a shell shows it."""
    code, colon, word = text.partition(":")
    number = _whole(code)
    if number is None:
        return None, None
    if colon:
        signal = _whole(word) or None
    else:
        number, signal = (number >> 8, number & 0x7F or None) if number > 0xFF else (number, None)  # noqa: PLR2004 - wait(2)
    return (128 + signal if signal and not number else number), signal
