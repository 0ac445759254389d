"""Jobs in the words of DRMAA2: what they are called, how they stand, why they ended."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import Enum

_SAFE_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.=-]{0,79}")
_NOT_SLUG = re.compile(r"[^a-z0-9]+")
_RESERVED = ("mailbox",)
"""What lies beside the DAGs' directories: a DAG of that name gets another one."""


class Words(str, Enum):
    """An enumeration whose members are their own words (enum.StrEnum is 3.11)."""

    def __str__(self) -> str:
        """Return the word."""
        return str(self.value)


class JobState(Words):
    """How a job stands (DRMAA2, GFD-R-P.194, section 8.1)."""

    UNDETERMINED = "undetermined"
    QUEUED = "queued"
    QUEUED_HELD = "queued_held"
    RUNNING = "running"
    SUSPENDED = "suspended"
    REQUEUED = "requeued"
    REQUEUED_HELD = "requeued_held"
    DONE = "done"
    FAILED = "failed"

    @property
    def ended(self) -> bool:
        """Whether the job's last process is gone and it will not run again by itself."""
        return self in (JobState.DONE, JobState.FAILED)


class EndCause(Words):
    """Why a job ended; the state says only that it ended."""

    COMPLETED = "completed"
    NONZERO_EXIT = "nonzero_exit"
    CHECKPOINTED = "checkpointed"
    """It saved and left by itself, to be run again (exit 85, or non-zero beside a checkpoint newer than the notice)."""
    PREEMPTED = "preempted"
    DISRUPTED = "disrupted"
    """Drained, evicted, reclaimed, requeued by hand: no fault of the job."""
    NODE_FAIL = "node_fail"
    BOOT_FAIL = "boot_fail"
    LAUNCH_FAILED = "launch_failed"
    """The cluster started it, but the program never ran or left no trace of its end."""
    LOST = "lost"
    """The cluster answers and does not know the job any more, and nothing tells how it ended."""
    TIMEOUT = "timeout"
    """Its walltime limit, or the notice before it."""
    DEADLINE = "deadline"
    OUT_OF_MEMORY = "out_of_memory"
    CANCELLED = "cancelled"
    CONFIG = "config"
    """What was asked for can never run: a name or a limit is wrong."""


@dataclass(frozen=True, slots=True)
class TaskKey:
    """One task instance of Airflow, whatever its try: who owns a directory and a job.

    Args:
        dag_id: the DAG.
        run_id: the DAG run.
        task_id: the task, with its groups.
        map_index: the index of a mapped task, -1 where it is not mapped.
        instance: which Airflow, where several share one cluster and `work_dir`; empty otherwise.
    """

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1
    instance: str = ""

    @property
    def digest(self) -> str:
        """12 hex digits that stand for all five fields."""
        parts = (self.instance, self.dag_id, self.run_id, self.task_id, str(self.map_index))
        return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogatepass")).hexdigest()[:12]

    @property
    def name(self) -> str:
        """Slurm's job name and Kubernetes' label: lower case, at most 46 characters, the same for every attempt."""
        return f"{_slug(self.dag_id)}-{_slug(self.task_id)}-{self.digest}"

    @property
    def path(self) -> str:
        """The task's directory, relative to `work_dir`: `dag/task/map/hash(run)`."""
        mapped = str(self.map_index) if self.map_index >= 0 else "unmapped"
        return "/".join((safe_segment(self.dag_id), safe_segment(self.task_id), mapped, self.digest))


@dataclass(frozen=True, slots=True)
class JobKey:
    """One attempt of a task instance: the idempotency key of its submission.

    Args:
        task: the task instance.
        attempt: 1, 2, …, counted on over tries and clears.
    """

    task: TaskKey
    attempt: int

    @property
    def name(self) -> str:
        """The task's name and the attempt: the mailbox' and an object's name, at most 54 characters."""
        return f"{self.task.name}-{self.attempt}"


@dataclass(frozen=True, slots=True)
class Granted:
    """What the cluster really gave, which a site's submit plugin may have rewritten.

    Args:
        qos: quality of service or priority class; empty where the cluster has none.
        partition: partition or queue.
        time_limit_s: walltime limit in seconds; None where unlimited or unknown.
        nodes: the nodes it ran on, in the cluster's own notation; empty before it runs.
    """

    qos: str = ""
    partition: str = ""
    time_limit_s: int | None = None
    nodes: str = ""


@dataclass(frozen=True, slots=True)
class JobSnapshot:
    """What a cluster said of one job at one moment.

    Args:
        job_id: the cluster's id.
        state: how it stands.
        cause: why it ended; None while it has not.
        exit_code: the exit code that the cluster noted, 0 to 255.
        signal: the signal that ended it, where the cluster noted one.
        restarts: how often the cluster itself has started it again.
        reason: why it waits, in the cluster's word (`Priority`, `BeginTime`, …).
        submit_s: when it was submitted, epoch seconds; None where unknown (so for all times).
        start_s: when it started to run.
        end_s: when it ended.
        preempt_s: when the cluster preempted it; None where it did not.
        cancelled_by: who cancelled it (a user's name or id); empty where nobody did or it is not known.
        granted: what it really got.
        raw: the cluster's own words for its state, kept as they came.
        detailed: False where only the state was asked, so that every other field is empty.
        complete: False where accounting is to tell who cancelled it, and has not yet.
        cancel_marked: whether the job carries our mark that Airflow asked for its end.
    """

    job_id: str
    state: JobState
    cause: EndCause | None = None
    exit_code: int | None = None
    signal: int | None = None
    restarts: int = 0
    reason: str = ""
    submit_s: float | None = None
    start_s: float | None = None
    end_s: float | None = None
    preempt_s: float | None = None
    cancelled_by: str = ""
    granted: Granted = Granted()
    raw: str = ""
    detailed: bool = True
    complete: bool = True
    cancel_marked: bool = False


@dataclass(frozen=True, slots=True)
class JobRef:
    """What is asked about: a job, and what tells it from another of the same id (ids are reused).

    Args:
        job_id: the cluster's id.
        name: the job's name, :attr:`TaskKey.name`.
        submitted_s: when we submitted it, epoch seconds of our clock.
        user: whose it is; empty: the asking user's.
    """

    job_id: str
    name: str
    submitted_s: float = 0.0
    user: str = ""


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A live job of ours, found on a cluster by its name.

    Args:
        job_id: the cluster's id.
        name: its name, :attr:`TaskKey.name`.
        state: how it stands.
        attempt: which attempt it is; None where its comment does not tell.
        nonce: its submission's nonce; empty where its comment does not tell.
        submit_s: when it was submitted, epoch seconds.
        profile: the profile its comment names.
        cancelled: whether its comment says that we have asked for its end.
        user: whose it is.
    """

    job_id: str
    name: str
    state: JobState
    attempt: int | None = None
    nonce: str = ""
    submit_s: float | None = None
    profile: str = ""
    cancelled: bool = False
    user: str = ""


def safe_segment(text: str) -> str:
    """Make one path segment of any text: itself where that is harmless, else a slug with a hash of all of it.

    Args:
        text: a DAG's or task's id, of any content.

    Returns:
        1 to 80 characters that are no `.`, no `..`, no option and hold no separator; different texts give different
        segments.
    """
    if _SAFE_SEGMENT.fullmatch(text) and text not in _RESERVED:
        return text
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{_slug(text)}~{digest}"


def _slug(text: str) -> str:
    return _NOT_SLUG.sub("-", text.lower())[:16].strip("-") or "x"
