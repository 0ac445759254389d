"""What an attempt left behind, and what it proves about its end.

A cluster's own word is not enough: Slurm 22.05 calls a preempted training that saved and left COMPLETED, a Job of
Kubernetes is Complete although its pod was evicted. The end markers that `jobside` writes, one per rank, decide there.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace

from airflow_profsched.core.jobs import EndCause, JobSnapshot, JobState

CHECKPOINTED_EXIT = 85
"""Exit code of a program that saved and wants to be run again (HTCondor's convention for self-checkpointing jobs)."""

_WALLTIME_SLACK_S = 60.0
"""Slurm may send the notice of `--signal` up to this much early (sbatch(1))."""

_MARKERS_DECIDE = (EndCause.COMPLETED, EndCause.NONZERO_EXIT, EndCause.LAUNCH_FAILED)
"""The cluster's causes over which the markers stand; `settle` without a cause waits for them too."""


@dataclass(frozen=True, slots=True)
class EndMarker:
    """What one rank's jobside noted at its end; `exit_code` is jobside's own, times are epoch seconds of its node."""

    rank: int
    ranks: int
    nonce: str
    job_id: str
    restart: int
    exit_code: int
    ended_s: float
    notice_s: float | None = None
    killed: bool = False
    fenced: bool = False
    done: bool = False
    start_step: int | None = None
    step: int | None = None
    checkpoint: str = ""
    host: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """The newest complete checkpoint as somebody saw it.

    Args:
        visible: False where it could not be seen, which is not the same as none.
        step: its step; None where there is none.
        path: where it lies.
        error: why it could not be seen.
    """

    visible: bool
    step: int | None = None
    path: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Findings:
    """What a look at an attempt's directories found.

    Args:
        markers: the end markers that could be read, of whatever run.
        plain: whether the command ran without jobside, since the node has no python3.
        checkpoint: the newest complete checkpoint.
        strange: what was not believed, in words.
    """

    markers: tuple[EndMarker, ...] = ()
    plain: bool = False
    checkpoint: CheckpointView = field(default=CheckpointView(visible=False, error="not looked"))
    strange: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Submission:
    """What is known of an attempt since it was submitted, to tell its markers from another's.

    Args:
        job_id: the cluster's id.
        nonce: the submission's nonce.
        ranks: how many markers a whole end has.
        walltime_notice_s: how long before the walltime limit a notice was asked for; None where none was.
        restarts: how often the cluster is known to have started it again; a marker of an earlier start tells nothing
            of this one.
    """

    job_id: str
    nonce: str
    ranks: int
    walltime_notice_s: float | None = None
    restarts: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """How an attempt ended, as far as the evidence goes.

    Args:
        cause: why it ended; None while the evidence does not suffice.
        exit_code: the exit code that counts, of `rank`.
        rank: the rank whose end decided; None where no marker did.
        start_step: the step that the program started from, by marker; None where no marker tells.
        step: the newest complete checkpoint's step, by marker or look; None where there is none or none can be seen.
        visible: whether the checkpoints could be seen, by anyone.
        strange: what was found and not believed, in words.
    """

    cause: EndCause | None
    exit_code: int | None = None
    rank: int | None = None
    start_step: int | None = None
    step: int | None = None
    visible: bool = False
    strange: tuple[str, ...] = ()


def findings_from_json(text: str) -> Findings:
    """Read the reply to a :class:`~airflow_profsched.cluster.exchange.Look`.

    Args:
        text: JSON of `workdir.look`. What a job wrote may be anything: a marker that is not whole is told, not
            believed.

    Returns:
        What was found.
    """
    body = json.loads(text)
    markers, strange = [], [str(line) for line in body.get("strange", ())]
    for raw in body.get("markers", ()):
        try:
            markers.append(_marker(raw))
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            strange.append(f"an end marker is not whole ({type(error).__name__}: {error})")
    seen = body.get("checkpoint") or {}
    checkpoint = CheckpointView(
        visible=seen.get("visible") is True,
        step=_step(seen.get("step")),
        path=str(seen.get("path") or ""),
        error=str(seen.get("error") or ""),
    )
    return Findings(tuple(markers), body.get("plain") is True, checkpoint, tuple(strange))


def _marker(raw: object) -> EndMarker:
    if not isinstance(raw, dict):
        raise TypeError(f"{raw!r} is not a mapping")
    notice = raw.get("notice_s")
    return EndMarker(
        rank=_whole(raw["rank"]),
        ranks=_whole(raw["ranks"]),
        nonce=_text(raw["nonce"]),
        job_id=_text(raw["job_id"]),
        restart=_whole(raw["restart"]),
        exit_code=_whole(raw["exit_code"]),
        ended_s=_moment(raw["ended_s"]),
        notice_s=None if notice is None else _moment(notice),
        killed=raw.get("killed") is True,
        fenced=raw.get("fenced") is True,
        done=raw.get("done") is True,
        start_step=_step(raw.get("start_step")),
        step=_step(raw.get("step")),
        checkpoint=str(raw.get("checkpoint") or ""),
        host=str(raw.get("host") or ""),
    )


def _whole(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{value!r} is not a whole number")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is not a text")
    return value


def _moment(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise TypeError(f"{value!r} is not a time")
    return float(value)


def _step(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def own_markers(found: Findings, own: Submission) -> tuple[EndMarker, ...]:
    """Pick the markers of this submission's newest start, one per rank.

    Args:
        found: what lies there.
        own: the submission; a marker of another is no evidence.

    Returns:
        By rank.
    """
    ours = [m for m in found.markers if m.nonce == own.nonce and m.job_id == own.job_id and 0 <= m.rank < own.ranks]
    newest = max((m.restart for m in ours), default=0)
    if newest < own.restarts:  # what an earlier start left; the newest has noted nothing yet
        return ()
    by_rank: dict[int, EndMarker] = {}
    # Where two files claim one rank, the one that proves less is believed.
    for marker in sorted((m for m in ours if m.restart == newest), key=lambda m: (m.done, m.ended_s), reverse=True):
        by_rank[marker.rank] = marker
    return tuple(by_rank[rank] for rank in sorted(by_rank))


def all_ended(found: Findings, own: Submission) -> bool:
    """Whether every rank of this submission has noted its end."""
    return len(own_markers(found, own)) == own.ranks


def settle(seen: JobSnapshot, found: Findings, own: Submission) -> Verdict:
    """Decide why an attempt ended. First match wins (measured on three releases of Slurm, see docs/explanation).

    1. every rank declared the run finished: COMPLETED, whatever was on its way to the job;
    2. a preemption that the cluster noted, whatever it calls the end;
    3. the cluster's own causes, but for "completed" and "failed";
    4. the markers;
    5. the exit code, for a command that ran without jobside, or failed before it.

    Args:
        seen: the ended job as the cluster tells it.
        found: what it left.
        own: its submission.

    Returns:
        The verdict; its cause is None where "completed" is all that is known.
    """
    markers = own_markers(found, own)
    base = _progress(found, markers)
    if len(markers) == own.ranks and all(m.done for m in markers):
        return replace(base, cause=EndCause.COMPLETED, exit_code=0)
    if seen.preempt_s is not None:
        return replace(base, cause=EndCause.PREEMPTED, exit_code=seen.exit_code)
    if seen.cause not in _MARKERS_DECIDE:
        return replace(base, cause=seen.cause, exit_code=seen.exit_code)
    return _by_markers(base, seen, markers, own) or _by_exit(base, seen, found, markers)


def may_still_come(seen: JobSnapshot, found: Findings, own: Submission) -> bool:
    """Whether a marker that is still on its way (a shared file system may be late) could change the verdict.

    Args:
        seen: the ended job as the cluster tells it.
        found: what it left.
        own: its submission.

    Returns:
        False where nothing is missing, or the cluster's own cause stands whatever the markers say.
    """
    if settle(seen, found, own).cause is None:
        return True
    open_ = seen.preempt_s is None and seen.cause in (EndCause.COMPLETED, EndCause.NONZERO_EXIT)
    return open_ and not found.plain and not all_ended(found, own)


def settle_unknown(last: JobSnapshot, found: Findings, own: Submission) -> Verdict:
    """Decide by its markers alone why a job ended of whose end the cluster says nothing.

    Args:
        last: the job as it was last known; its state does not count.
        found: what it left.
        own: its submission.

    Returns:
        The verdict; its cause is None where the markers do not tell.
    """
    markers = own_markers(found, own)
    if len(markers) < own.ranks:
        return _progress(found, markers)
    failed = any(m.exit_code for m in markers)
    state, cause = (JobState.FAILED, EndCause.NONZERO_EXIT) if failed else (JobState.DONE, EndCause.COMPLETED)
    return settle(replace(last, state=state, cause=cause), found, own)


def _progress(found: Findings, markers: tuple[EndMarker, ...]) -> Verdict:
    steps = [m.step for m in markers if m.step is not None]
    if found.checkpoint.step is not None:
        steps.append(found.checkpoint.step)
    started = max((m.start_step for m in markers if m.start_step is not None), default=None)
    visible = found.checkpoint.visible or bool(steps)
    return Verdict(None, start_step=started, step=max(steps, default=None), visible=visible, strange=found.strange)


def _by_markers(base: Verdict, seen: JobSnapshot, markers: tuple[EndMarker, ...], own: Submission) -> Verdict | None:
    unnoticed = sorted((m for m in markers if m.exit_code and m.notice_s is None), key=lambda m: m.ended_s)
    if unnoticed:
        first = unnoticed[0]
        saved = first.exit_code == CHECKPOINTED_EXIT
        cause = EndCause.CHECKPOINTED if saved else EndCause.NONZERO_EXIT
        return replace(base, cause=cause, exit_code=first.exit_code, rank=first.rank)
    noticed = sorted((m for m in markers if m.notice_s is not None), key=lambda m: m.ended_s)
    if not noticed:
        return None
    cause = EndCause.TIMEOUT if _near_limit(seen, noticed, own) else EndCause.PREEMPTED
    return replace(base, cause=cause, exit_code=noticed[0].exit_code, rank=noticed[0].rank)


def _near_limit(seen: JobSnapshot, noticed: list[EndMarker], own: Submission) -> bool:
    if own.walltime_notice_s is None or seen.granted.time_limit_s is None or seen.start_s is None:
        return False
    first = min(m.notice_s for m in noticed if m.notice_s is not None)
    return first >= seen.start_s + seen.granted.time_limit_s - own.walltime_notice_s - _WALLTIME_SLACK_S


def _by_exit(base: Verdict, seen: JobSnapshot, found: Findings, markers: tuple[EndMarker, ...]) -> Verdict:
    if seen.cause is EndCause.COMPLETED and not (found.plain and not markers and seen.exit_code == 0):
        return base
    if seen.cause is EndCause.NONZERO_EXIT and seen.exit_code == CHECKPOINTED_EXIT:
        return replace(base, cause=EndCause.CHECKPOINTED, exit_code=seen.exit_code)
    return replace(base, cause=seen.cause, exit_code=seen.exit_code)
