"""Slurm behind the protocol of all clusters."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from airflow_profsched.cluster.exchange import Exchange
from airflow_profsched.cluster.scheduler import Order
from airflow_profsched.core.errors import SubmitError, SubmitLimitError
from airflow_profsched.core.jobs import FoundJob, JobRef, JobSnapshot, TaskKey
from airflow_profsched.core.placement import SlurmPlacement
from airflow_profsched.slurm import cli, reasons, script
from airflow_profsched.slurm.site import Site


@dataclass(frozen=True, slots=True)
class SlurmScheduler:
    """A Slurm cluster for one placement; see :class:`airflow_profsched.cluster.scheduler.Scheduler`.

    Args:
        placement: what the policy decided.
        site: what the cluster has; None where nobody has read it.
    """

    placement: SlurmPlacement
    site: Site | None = None

    def render(self, order: Order) -> str:
        """Return the batch script."""
        return script.render(self.placement, order)

    def submit(self, order: Order) -> Exchange[str]:
        """Submit once and return the job's id."""
        try:
            return (yield from cli.submit(self.render(order), order.key.task.name, order.nonce))
        except SubmitLimitError:
            raise
        except SubmitError as error:
            raise SubmitError(self._refused(str(error))) from error

    def _refused(self, said: str) -> str:
        placed = self.placement
        asked = {
            "partition": placed.partition,
            "QoS": placed.qos,
            "account": placed.account,
            "constraint": placed.constraint,
        }
        words = ", ".join(f"{name} {value}" for name, value in asked.items() if value) or "its defaults"
        there = f" There: {self.site.words()}." if self.site is not None else ""
        return f"{placed.cluster} refused the job (profile {placed.profile}: {words}): {said}.{there} Mend the policy file or the task"

    def find(self, task: TaskKey) -> Exchange[tuple[FoundJob, ...]]:
        """Return the live jobs of a task instance, newest first."""
        return cli.find(task.name)

    def query(self, refs: Collection[JobRef], details: Collection[JobRef]) -> Exchange[dict[str, JobSnapshot]]:
        """Ask about all of them at once."""
        release = self.site.release if self.site is not None else ()
        accounting = self.site.accounting if self.site is not None else False
        return cli.query(refs, details, release=release, accounting=accounting)

    def cancel(self, job_id: str, why: str) -> Exchange[None]:  # noqa: ARG002 - Slurm has no place for the reason
        """Cancel a job and leave a mark of who did it."""
        return cli.cancel(job_id)

    def nudge(self, job_id: str) -> Exchange[None]:
        """Let a job start at once after a restart."""
        return cli.nudge(job_id)

    def hopeless(self, seen: JobSnapshot) -> str:
        """Return in words why a waiting job can never start; empty where it can."""
        why = reasons.never(seen.reason) or self._exceeds(seen.reason) or self._too_many_nodes(seen.reason)
        return f"Slurm says {seen.reason}: {why}" if why else ""

    def _exceeds(self, reason: str) -> str:
        """A group's limit clears when others end, unless the job is larger than the limit by itself."""
        if not reasons.of_a_group(reason) or self.site is None or self.placement.qos not in self.site.qos:
            return ""
        needs, limits = self.placement.resources, self.site.qos[self.placement.qos].grp_tres
        asked = {
            "gres/gpu": needs.gpus_total,
            "node": needs.nodes,
            "cpu": (needs.cpus or 1) * needs.nodes,
            "mem": (needs.mem_mib or 0) * needs.nodes,
        }
        over = [f"{name} {asked[name]} of {limit}" for name, limit in limits.items() if asked.get(name, 0) > limit]
        return (
            f"by itself it asks for more than QoS {self.placement.qos} may have together ({', '.join(over)})"
            if over
            else ""
        )

    def _too_many_nodes(self, reason: str) -> str:
        """PartitionNodeLimit also stands where nodes are down; only a size that the partition never has is hopeless."""
        partition = self.site.partitions.get(self.placement.partition) if self.site is not None else None
        if reason != "PartitionNodeLimit" or partition is None or self.placement.resources.nodes <= partition.nodes:
            return ""
        return f"it asks for {self.placement.resources.nodes} nodes, and partition {self.placement.partition} has {partition.nodes}"

    def look_further(self, job_id: str) -> str:
        """Return the command with which a person looks further."""
        accounted = self.site is None or self.site.accounting
        return f"sacct --duplicates --jobs={job_id}" if accounted else f"scontrol show job {job_id}"
