"""The only place that knows how Slurm spells a job's state and end (job_state_codes in squeue(1) and sacct(1))."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from airflow_profsched.core.jobs import EndCause, JobState

BASE: dict[str, tuple[JobState, EndCause | None]] = {
    "PENDING": (JobState.QUEUED, None),
    "RUNNING": (JobState.RUNNING, None),
    "SUSPENDED": (JobState.SUSPENDED, None),
    "COMPLETED": (JobState.DONE, EndCause.COMPLETED),
    "FAILED": (JobState.FAILED, EndCause.NONZERO_EXIT),
    "CANCELLED": (JobState.FAILED, EndCause.CANCELLED),
    "PREEMPTED": (JobState.FAILED, EndCause.PREEMPTED),
    "TIMEOUT": (JobState.FAILED, EndCause.TIMEOUT),
    "DEADLINE": (JobState.FAILED, EndCause.DEADLINE),
    "NODE_FAIL": (JobState.FAILED, EndCause.NODE_FAIL),
    "BOOT_FAIL": (JobState.FAILED, EndCause.BOOT_FAIL),
    "OUT_OF_MEMORY": (JobState.FAILED, EndCause.OUT_OF_MEMORY),
}

FLAGS: dict[str, JobState | None] = {
    # What a flag says where it stands alone, since the commands show it instead of the base; None: nothing about the state.
    "COMPLETING": JobState.RUNNING,  # processes may still live: not an end
    "CONFIGURING": JobState.RUNNING,  # nodes are allocated and boot
    "EXPEDITING": JobState.QUEUED,
    "LAUNCH_FAILED": JobState.REQUEUED_HELD,
    "POWER_UP_NODE": JobState.RUNNING,
    "RECONFIG_FAIL": JobState.REQUEUED_HELD,
    "REQUEUED": JobState.REQUEUED,
    "REQUEUE_FED": JobState.REQUEUED,
    "REQUEUE_HOLD": JobState.REQUEUED_HELD,
    "RESIZING": JobState.RUNNING,
    "RESV_DEL_HOLD": JobState.QUEUED_HELD,
    "REVOKED": None,
    "SIGNALING": JobState.RUNNING,
    "SPECIAL_EXIT": JobState.REQUEUED_HELD,
    "STAGE_OUT": JobState.RUNNING,
    "STOPPED": JobState.SUSPENDED,
    "UPDATE_DB": None,
}
"""Flags that keep a base state from being an end, or say more about a waiting job."""


@dataclass(frozen=True, slots=True)
class Reading:
    """A state as it was read.

    Args:
        state: in DRMAA2's words.
        cause: why the job ended; None while it has not.
        cancelled_by: the uid behind `CANCELLED by`; empty where none is named.
        raw: the words as they came.
    """

    state: JobState
    cause: EndCause | None
    cancelled_by: str
    raw: str


def parse(tokens: str | Iterable[str]) -> Reading:
    """Read a state in any of its spellings.

    Args:
        tokens: `RUNNING`, `CANCELLED by 1000`, `COMPLETI+`, or a list of base state and flags.

    Returns:
        The state. A word that nobody knows stays undetermined: it is neither an end nor a success.
    """
    words = [tokens] if isinstance(tokens, str) else [str(token) for token in tokens]
    raw = ",".join(words)
    names = [_name(word) for word in words if word.strip()]
    by = next((word.split(" by ", 1)[1].split()[0] for word in words if _names_somebody(word)), "")
    if not names or any(name not in BASE and name not in FLAGS for name in names):
        return Reading(JobState.UNDETERMINED, None, by, raw)
    flagged = [FLAGS[name] for name in names if name in FLAGS]
    based = [BASE[name] for name in names if name in BASE]
    state, cause = based[0] if based else (JobState.UNDETERMINED, None)
    loud = [flag for flag in flagged if flag is not None]
    if loud and (state.ended or state in (JobState.UNDETERMINED, JobState.QUEUED)):
        return Reading(max(loud, key=_RANK.index), None, by, raw)
    if flagged and state.ended and not loud:
        return Reading(JobState.UNDETERMINED, None, by, raw)  # REVOKED, UPDATE_DB: the record is on the move
    return Reading(state, cause, by, raw)


_RANK = [
    JobState.QUEUED,
    JobState.RUNNING,
    JobState.SUSPENDED,
    JobState.REQUEUED,
    JobState.QUEUED_HELD,
    JobState.REQUEUED_HELD,
]


def _name(word: str) -> str:
    first = word.split(maxsplit=1)[0].upper()
    if not first.endswith("+"):
        return first
    meant = [known for known in (*BASE, *FLAGS) if known.startswith(first[:-1])]
    return meant[0] if len(meant) == 1 else first  # sacct cuts words where its column is narrow


def _names_somebody(word: str) -> bool:
    return " by " in word and bool(word.split(" by ", 1)[1].split())
