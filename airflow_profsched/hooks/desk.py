"""One placement at work: its cluster, its rules and its directories, for whoever drives it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_profsched.cluster import mailbox, workdir
from airflow_profsched.cluster.exchange import Look, ReadFile
from airflow_profsched.cluster.watch import Watched
from airflow_profsched.core.lifecycle import Rules
from airflow_profsched.core.placement import SlurmPlacement
from airflow_profsched.slurm import site as slurm_site
from airflow_profsched.slurm.scheduler import SlurmScheduler

if TYPE_CHECKING:
    from collections.abc import Callable

    from airflow_profsched.cluster.exchange import Exchange, Reply, Request
    from airflow_profsched.core.jobs import JobKey, JobSnapshot, TaskKey
    from airflow_profsched.core.run import Run
    from airflow_profsched.slurm.site import Site

SITE_FOR_S = 3600.0
"""How long what a site said of itself is believed."""


@dataclass(frozen=True, slots=True)
class Desk:
    """Everything that is needed to drive the runs of one placement.

    Args:
        placement: what the policy decided.
        site: what the cluster has, as read at most an hour ago; None where nobody has read it.
        deadline_s: when the whole task must have ended, epoch seconds; None where it need not.
    """

    placement: SlurmPlacement
    site: Site | None = None
    deadline_s: float | None = None

    @property
    def scheduler(self) -> SlurmScheduler:
        """The cluster, for this placement."""
        return SlurmScheduler(self.placement, self.site)

    @property
    def rules(self) -> Rules:
        """What the machine of preemption and resume has to know."""
        placed, budgets = self.placement, self.placement.budgets
        return Rules(
            cluster=placed.cluster,
            checkpointed=placed.checkpointed,
            ranks=placed.resources.nodes * placed.resources.tasks_per_node,
            without_progress=budgets.without_progress,
            unproven=budgets.unproven,
            walltime_notice_s=placed.walltime_notice_s,
            deadline_s=self.deadline_s,
            lost_s=float(placed.node_lost_after_s),
        )

    def paths(self, key: JobKey) -> workdir.AttemptPaths:
        """Where an attempt's files lie."""
        return workdir.AttemptPaths(self.placement.work_dir, key)

    def checkpoint_dir(self, task: TaskKey) -> str:
        """Where the task's checkpoints lie; empty where it has none."""
        if not self.placement.checkpointed:
            return ""
        return self.placement.checkpoint_dir or workdir.default_checkpoint_dir(self.placement.work_dir, task)

    def look(self, run: Run) -> Look:
        """The look at the newest attempt's directories."""
        paths = self.paths(run.key)
        placed = self.placement
        return Look(placed.work_dir, paths.attempt_dir, self.checkpoint_dir(run.task), placed.layout)

    def log_tail(self, key: JobKey, max_bytes: int) -> ReadFile:
        """The end of an attempt's log."""
        return ReadFile(self.placement.work_dir, self.paths(key).log, max_bytes)

    def result(self, key: JobKey, max_bytes: int) -> ReadFile:
        """An attempt's result."""
        return ReadFile(self.placement.work_dir, self.paths(key).result, max_bytes)

    def watched(self, run: Run) -> Watched:
        """What a step of the run is taken with."""
        return Watched(self.scheduler, self.rules, self.look(run))

    def standing(self, run: Run, job: JobSnapshot | None) -> str:
        """Say in one line how a job stands.

        Args:
            run: the run.
            job: what the cluster said; None where it does not know the job.

        Returns:
            The line; empty where only the state was asked.
        """
        cluster = self.placement.cluster
        if job is None:
            return f"job {run.job_id} is not known to {cluster}: waiting for evidence of its end"
        if not job.detailed:
            return ""
        words = [f"job {job.job_id} on {cluster} is {job.raw or job.state.value}"]
        words += [f"({job.reason})"] if job.reason not in ("", "None") else []
        given = (("node", job.granted.nodes), ("QoS", job.granted.qos), ("partition", job.granted.partition))
        words += [", ".join(f"{name} {value}" for name, value in given if value)]
        return " ".join(word for word in words if word)

    def to_json(self) -> dict[str, Any]:
        """Turn it into plain JSON, for a trigger's arguments; what the site has stays in its file."""
        return {"placement": self.placement.to_json(), "deadline_s": self.deadline_s}

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> Desk:
        """Read what :meth:`to_json` wrote. Blocking: the site's file is read as well.

        Args:
            body: the record.

        Returns:
            The desk.
        """
        placement = SlurmPlacement.from_json(body["placement"])
        return cls(placement, kept_site(placement), body.get("deadline_s"))


def kept_site(placement: SlurmPlacement) -> Site | None:
    """Return what the cluster said of itself, if that was less than an hour ago.

    Args:
        placement: names the cluster and its directory.

    Returns:
        What was kept; None where nothing is, or it is too old.
    """
    text = mailbox.read_kept(placement.work_dir, f"site-{placement.cluster}.json", SITE_FOR_S, time.time())
    return None if text is None else slurm_site.Site.from_json(text)


def read_site(placement: SlurmPlacement, send: Callable[[Request], Reply]) -> Site:
    """Return what the cluster has: as kept, or asked anew and kept.

    Args:
        placement: names the cluster and its directory.
        send: who carries the question.

    Returns:
        What the cluster has.
    """
    from airflow_profsched.cluster.exchange import run  # noqa: PLC0415 - the verb's driver, here only

    kept = kept_site(placement)
    if kept is not None:
        return kept
    site = run(_ask(), send)
    mailbox.keep(placement.work_dir, f"site-{placement.cluster}.json", site.to_json())
    return site


def _ask() -> Exchange[Site]:
    return slurm_site.read_site()
