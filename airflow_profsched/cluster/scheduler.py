"""What every kind of cluster can be asked and told: the verbs behind one protocol."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from airflow_profsched.cluster.exchange import Exchange
from airflow_profsched.core.jobs import FoundJob, JobKey, JobRef, JobSnapshot, TaskKey


@dataclass(frozen=True, slots=True)
class Order:
    """One attempt, ready to be submitted: its files lie in `attempt_dir`.

    Args:
        key: its key.
        nonce: its submission's nonce.
        attempt_dir: the attempt's directory, absolute, on the file system that nodes share.
        try_number: Airflow's try, for people who read the comment.
        excluded: nodes to keep away from.
    """

    key: JobKey
    nonce: str
    attempt_dir: str
    try_number: int = 1
    excluded: tuple[str, ...] = ()


class Scheduler(Protocol):
    """A cluster for one placement. Every verb is a conversation (see `exchange.py`)."""

    def render(self, order: Order) -> str:
        """Return the script or manifest that :meth:`submit` would send."""

    def submit(self, order: Order) -> Exchange[str]:
        """Submit once and return the job's id; a lost answer is looked up by key before it is an error."""

    def find(self, task: TaskKey) -> Exchange[tuple[FoundJob, ...]]:
        """Return the live jobs of a task instance, of any attempt, newest first."""

    def query(self, refs: Collection[JobRef], details: Collection[JobRef]) -> Exchange[Mapping[str, JobSnapshot]]:
        """Ask about all of them at once; a job that is absent from the answer is not known to the cluster."""

    def cancel(self, job_id: str, why: str) -> Exchange[None]:
        """Cancel a job and leave a mark of who did it; one that has ended is no error."""

    def nudge(self, job_id: str) -> Exchange[None]:
        """Ask for an immediate start of a job that the cluster put off after a restart."""

    def hopeless(self, seen: JobSnapshot) -> str:
        """Return in words why a waiting job can never start; empty where it can."""

    def look_further(self, job_id: str) -> str:
        """Return the command with which a person looks further."""
