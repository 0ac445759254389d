"""Why a job waits (job_reason_codes in squeue(1)): which reasons clear by themselves, and which never can."""

from __future__ import annotations

import re

from airflow_profsched.core.jobs import JobState

_NEVER = {
    "BadConstraints": "no node can ever have what it asks for",
    "DependencyNeverSatisfied": "the job it depends on can no longer end as it must",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its QoS is not valid",
    "AccountNotAllowed": "its account may not use this partition",
    "QOSNotAllowed": "its QoS may not use this partition",
    "PartitionConfig": "it does not fit the partition's limits",
    "PartitionTimeLimit": "its walltime is longer than the partition allows",
    "JobHoldMaxRequeue": "it was requeued too often, and Slurm holds it",
}
_PER_JOB = re.compile(r"(QOS|Assoc|Max)\w*Per(Job|Node)(Limit)?$|QOSMin\w+$")
_GROUP = re.compile(r"(QOS|Assoc)Grp\w+$")
_HELD = ("JobHeldUser", "JobHeldAdmin")
_REQUEUED_HELD = re.compile(r"requeued[ _](?:in[ _])?held")
"""squeue writes these reasons with blanks, scontrol with underscores."""


def never(reason: str) -> str:
    """Say why a reason can never clear by itself.

    Args:
        reason: Slurm's word, or its sentence.

    Returns:
        In words; empty where it can clear.
    """
    if reason in _NEVER:
        return _NEVER[reason]
    if "user env retrieval failed" in reason.replace("_", " "):
        return "the user's environment could not be read on the node"
    if _PER_JOB.match(reason):
        return "it is larger than a limit for one job"
    return ""


def of_a_group(reason: str) -> bool:
    """Whether a reason is a limit that several jobs share: it clears, unless the job is larger by itself."""
    return _GROUP.match(reason) is not None


def waiting_state(state: JobState, reason: str, restarts: int) -> JobState:
    """Say more exactly how a pending job waits.

    Args:
        state: as its state word says.
        reason: why it waits.
        restarts: how often Slurm has started it again.

    Returns:
        Held or requeued where the reason or the restarts say so.
    """
    if state is not JobState.QUEUED:
        return state
    if reason == "JobHoldMaxRequeue" or _REQUEUED_HELD.search(reason) or (reason in _HELD and restarts):
        return JobState.REQUEUED_HELD
    if reason in _HELD:
        return JobState.QUEUED_HELD
    return JobState.REQUEUED if restarts else state
