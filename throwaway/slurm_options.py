"""How a throwaway Slurm is set up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

QOS: dict[str, dict[str, str]] = {
    "training": {
        "Priority": "100",
        "GrpTRES": "gres/gpu=512",
        "MaxWall": "48:00:00",
        "GraceTime": "10",
        "PreemptMode": "REQUEUE",
    },
    "inference": {
        "Priority": "200",
        "GrpTRES": "gres/gpu=64",
        "MaxWall": "02:00:00",
        "Preempt": "training",
        # "never preempted" needs no setting: a QoS is preempted by those alone that name it.
    },
}


@dataclass
class Options:
    """How a throwaway Slurm is set up.

    Args:
        nodes: how many slurmd.
        gpus: fake GPUs per node.
        gpu_type: their type (`a100`); empty: none. Every node has the features a100 and ib all the same.
        accounting: slurmdbd with MariaDB, and preemption by QoS; else by partition priority.
        quick: scheduler intervals of a second; False: Slurm's own defaults, for benchmarks.
        kill_wait_s: seconds between SIGTERM and SIGKILL.
        min_job_age_s: how long the controller keeps an ended job.
        grace_s: GraceTime of QoS `training`, or of partition `train` without accounting; not with a `qos` of your own.
        preempt_mode: REQUEUE or CANCEL, likewise.
        qos: QoS by name, with sacctmgr's settings.
        partitions: further partitions by name, with their nodes (`n[3-4]`).
        extra: further lines of slurm.conf.
    """

    nodes: int = 2
    gpus: int = 4
    accounting: bool = True
    quick: bool = True
    kill_wait_s: int = 30
    min_job_age_s: int = 300
    qos: Mapping[str, Mapping[str, str]] = field(default_factory=lambda: QOS)
    partitions: Mapping[str, str] = field(default_factory=dict)
    extra: Sequence[str] = ()
    grace_s: int = 10
    gpu_type: str = ""
    preempt_mode: str = "REQUEUE"

    def __post_init__(self) -> None:
        """Put grace and mode into the QoS, where they are the built-in ones."""
        if self.qos is QOS:
            training = {**QOS["training"], "GraceTime": str(self.grace_s), "PreemptMode": self.preempt_mode}
            self.qos = {**QOS, "training": training}
