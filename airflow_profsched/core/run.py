"""`Run`: all that must survive a crash, and the pure steps that change it. JSON in, JSON out."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar, Union, cast

from airflow_profsched.core.evidence import Submission
from airflow_profsched.core.jobs import EndCause, Granted, JobKey, TaskKey, Words

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

Json = Union[None, bool, int, float, str, "list[Json]", "dict[str, Json]"]

_HISTORY = 32

T = TypeVar("T")


class Phase(Words):
    """Where a run stands between Airflow and the cluster."""

    NEW = "new"
    SUBMITTING = "submitting"
    """A submission may be on its way: before another one the cluster is asked by key."""
    WATCHING = "watching"
    WAITING = "waiting"
    """No job; the next attempt may not be submitted before `not_before_s`."""
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Attempt:
    """One ended attempt, for the record; times in epoch seconds."""

    attempt: int
    job_id: str
    cause: str
    exit_code: int | None = None
    submitted_s: float | None = None
    start_s: float | None = None
    end_s: float | None = None
    start_step: int | None = None
    step: int | None = None
    qos: str = ""
    partition: str = ""
    nodes: str = ""
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """One task instance's way over all its attempts.

    Args:
        task: whose it is.
        phase: where it stands.
        attempt: the newest attempt's number; counts on over tries and clears.
        job_id: the newest attempt's job; empty while it has none.
        nonce: its submission's nonce.
        submitted_s: when it was submitted, epoch seconds.
        start_step: the newest complete checkpoint's step when it was submitted.
        restarts: how often the cluster itself started it again, as last seen.
        started_s: when its newest start ran.
        granted: what the cluster gave, as last seen.
        stopping: why this attempt was stopped by us; empty where it was not.
        adopted: whether an earlier try submitted it.
        missing_since_s: since when the cluster does not know the job.
        ended_since_s: since when the job has been seen ended without enough evidence.
        marked_since_s: since when a running job's ranks have all noted their end.
        not_before_s: when the next attempt may be submitted.
        preemptions: attempts that ended for no fault of the job's.
        without_progress: resumes in a row without a newer checkpoint.
        unproven: resumes in a row whose checkpoint could not be seen.
        unlucky: attempts in a row that a node ended at once.
        excluded: nodes that the next attempt keeps away from.
        fence: whether processes of the attempt before may live on.
        history: the newest attempts that ended.
        outcome: what it came to; empty while it goes on.
    """

    task: TaskKey
    phase: Phase = Phase.NEW
    attempt: int = 0
    job_id: str = ""
    nonce: str = ""
    submitted_s: float = 0.0
    start_step: int | None = None
    restarts: int = 0
    started_s: float | None = None
    granted: Granted = field(default=Granted())
    stopping: str = ""
    adopted: bool = False
    missing_since_s: float | None = None
    ended_since_s: float | None = None
    marked_since_s: float | None = None
    not_before_s: float = 0.0
    preemptions: int = 0
    without_progress: int = 0
    unproven: int = 0
    unlucky: int = 0
    excluded: tuple[str, ...] = ()
    fence: bool = False
    history: tuple[Attempt, ...] = field(default=())
    outcome: str = ""

    @property
    def key(self) -> JobKey:
        """The newest attempt's key."""
        return JobKey(self.task, self.attempt)

    def submission(self, ranks: int, walltime_notice_s: float | None = None) -> Submission:
        """What tells this attempt's markers from another's."""
        return Submission(self.job_id, self.nonce, ranks, walltime_notice_s, self.restarts)

    def to_json(self) -> dict[str, Json]:
        """Turn it into plain JSON, for the state store and for a trigger's arguments."""
        return cast("dict[str, Json]", json.loads(json.dumps(asdict(self))))

    @classmethod
    def from_json(cls, body: Mapping[str, Json]) -> Run:
        """Read what :meth:`to_json` wrote; fields of a newer version are passed over.

        Args:
            body: the record.

        Returns:
            The run.
        """
        fields = _known(cls, body) | {
            "task": _build(TaskKey, _known(TaskKey, body["task"])),
            "phase": Phase(str(body.get("phase", Phase.NEW.value))),
            "granted": _build(Granted, _known(Granted, body.get("granted"))),
            "excluded": tuple(cast("list[str]", body.get("excluded") or ())),
            "history": tuple(
                _build(Attempt, _known(Attempt, row)) for row in cast("list[Json]", body.get("history") or ())
            ),
        }
        return _build(cls, fields)


def _known(kind: type[Run | TaskKey | Granted | Attempt], body: object) -> dict[str, object]:
    given = cast("Mapping[str, object]", body or {})
    return {name: given[name] for name in kind.__dataclass_fields__ if name in given}


def _build(kind: Callable[..., T], values: Mapping[str, object]) -> T:
    return kind(**values)


def submitting(run: Run, attempt: int, nonce: str, now_s: float, start_step: int | None) -> Run:
    """Note that an attempt is about to be submitted, before it is.

    Args:
        run: the run.
        attempt: the attempt's number, higher than any seen before.
        nonce: a fresh nonce.
        now_s: epoch seconds.
        start_step: the newest complete checkpoint's step now; None where there is none.

    Returns:
        The run to keep before the request goes out.
    """
    return replace(
        _without_job(run),
        phase=Phase.SUBMITTING,
        attempt=attempt,
        nonce=nonce,
        submitted_s=now_s,
        start_step=start_step,
    )


def watching(run: Run, job_id: str, *, adopted: bool = False) -> Run:
    """Note the job that a submission, or a search by key, came to.

    Args:
        run: the run.
        job_id: the cluster's id.
        adopted: whether an earlier try submitted it.

    Returns:
        The run, watching that job.
    """
    return replace(run, phase=Phase.WATCHING, job_id=job_id, adopted=adopted, fence=False)


def waiting(run: Run, not_before_s: float) -> Run:
    """Note that the next attempt has to wait.

    Args:
        run: the run.
        not_before_s: until when, epoch seconds.

    Returns:
        The run, without a job.
    """
    return replace(_without_job(run), phase=Phase.WAITING, not_before_s=not_before_s)


def recorded(run: Run, ended: Attempt) -> Run:
    """Add an ended attempt to the history, which keeps the newest 32."""
    return replace(run, history=(*run.history, ended)[-_HISTORY:])


def stopped_for(run: Run) -> EndCause | None:
    """Why this attempt was stopped by us; None where it was not."""
    return EndCause(run.stopping) if run.stopping else None


def _without_job(run: Run) -> Run:
    """Forget what belongs to one attempt only."""
    return replace(
        run,
        job_id="",
        restarts=0,
        started_s=None,
        granted=Granted(),
        stopping="",
        adopted=False,
        missing_since_s=None,
        ended_since_s=None,
        marked_since_s=None,
    )
