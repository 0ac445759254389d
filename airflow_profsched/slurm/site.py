"""What a Slurm site has: release, limits, QoS, partitions."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, field

from airflow_profsched.cluster.exchange import Command, Exchange
from airflow_profsched.core import units
from airflow_profsched.core.placement import SlurmPlacement
from airflow_profsched.slurm.replies import checked

_QOS_FIELDS = "name,priority,gracetime,grptres,maxwall,preempt,preemptmode"
_MARGIN_S = 2.0
_PAIR = re.compile(r"(\w[\w:.]*)=(\S*)")


@dataclass(frozen=True, slots=True)
class Qos:
    """A QoS; durations in seconds, None where there is no limit."""

    priority: int = 0
    grace_s: int = 0
    grp_tres: dict[str, int] = field(default_factory=dict)
    max_wall_s: int | None = None
    preempt: tuple[str, ...] = ()
    preempt_mode: str = ""


@dataclass(frozen=True, slots=True)
class Partition:
    """A partition; durations in seconds, None where there is no limit."""

    state: str = ""
    grace_s: int = 0
    max_time_s: int | None = None
    nodes: int = 0
    gpus: int = 0
    preempt_mode: str = ""
    priority_tier: int = 1
    default: bool = False


@dataclass(frozen=True, slots=True)
class Site:
    """A Slurm site.

    Args:
        cluster: its own name.
        release: such as (22, 5, 8).
        accounting: whether there is slurmdbd, and QoS with it.
        kill_wait_s: seconds between SIGTERM and SIGKILL.
        min_job_age_s: how long the controller keeps an ended job.
        preempt_type: the plugin, such as `preempt/qos`.
        preempt_mode: what happens to a preempted job.
        qos: by name.
        partitions: by name.
    """

    cluster: str = ""
    release: tuple[int, ...] = ()
    accounting: bool = False
    kill_wait_s: int = 30
    min_job_age_s: int = 300
    preempt_type: str = ""
    preempt_mode: str = ""
    qos: dict[str, Qos] = field(default_factory=dict)
    partitions: dict[str, Partition] = field(default_factory=dict)

    def to_json(self) -> str:
        """Write it as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Site:
        """Read what :meth:`to_json` wrote."""
        body = json.loads(text)
        body["release"] = tuple(body["release"])
        body["qos"] = {name: Qos(**{**one, "preempt": tuple(one["preempt"])}) for name, one in body["qos"].items()}
        body["partitions"] = {name: Partition(**one) for name, one in body["partitions"].items()}
        return cls(**body)

    def words(self) -> str:
        """Say what there is, in one line."""
        release = ".".join(str(part) for part in self.release) or "of unknown release"
        qos = f"QoS {', '.join(sorted(self.qos))}" if self.accounting else "no accounting, so no QoS"
        return f"Slurm {release}, cluster {self.cluster}: partitions {', '.join(sorted(self.partitions))}; {qos}"


def read_site() -> Exchange[Site]:
    """Ask a site what it has: three questions, to be kept for an hour.

    Returns:
        The site.
    """
    config = _config(checked((yield (asked := Command(("scontrol", "show", "config")))), asked))
    partitions = checked((yield (asked := Command(("scontrol", "show", "partition", "--oneliner")))), asked)
    accounting = config.get("AccountingStorageType", "").endswith("slurmdbd")
    qos = ""
    if accounting:
        asked = Command(("sacctmgr", "--noheader", "--parsable2", "show", "qos", f"format={_QOS_FIELDS}"))
        qos = checked((yield asked), asked)
    return Site(
        cluster=config.get("ClusterName", ""),
        release=tuple(int(part) for part in re.findall(r"\d+", config.get("SLURM_VERSION", ""))[:3]),
        accounting=accounting,
        kill_wait_s=_first_number(config.get("KillWait", ""), 30),
        min_job_age_s=_first_number(config.get("MinJobAge", ""), 300),
        preempt_type=config.get("PreemptType", ""),
        preempt_mode=config.get("PreemptMode", ""),
        qos=dict(_qos(line) for line in qos.splitlines() if line.count("|") == _QOS_FIELDS.count(",")),
        partitions=dict(_partition(line) for line in partitions.splitlines() if line.startswith("PartitionName=")),
    )


def _config(out: str) -> dict[str, str]:
    pairs = (line.partition("=") for line in out.splitlines() if " = " in line)
    return {name.strip(): value.strip() for name, _, value in pairs}


def _first_number(text: str, default: int) -> int:
    match = re.match(r"\d+", text)
    return int(match.group()) if match else default


def _time(text: str) -> int | None:
    try:
        return units.seconds(text) or None
    except ValueError:
        return None


def _qos(line: str) -> tuple[str, Qos]:
    name, priority, grace, grp_tres, max_wall, preempt, mode = line.split("|")
    others = tuple(other for other in preempt.split(",") if other)
    grace_s, wall_s = _time(grace) or 0, _time(max_wall)
    return name, Qos(_first_number(priority, 0), grace_s, units.tres(grp_tres), wall_s, others, mode)


def _partition(line: str) -> tuple[str, Partition]:
    pairs = dict(_PAIR.findall(line))
    tres = units.tres(line.partition(" TRES=")[2].split(" ")[0])
    return pairs["PartitionName"], Partition(
        state=pairs.get("State", ""),
        grace_s=_first_number(pairs.get("GraceTime", ""), 0),
        max_time_s=_time(pairs.get("MaxTime", "")),
        nodes=_first_number(pairs.get("TotalNodes", ""), 0),
        gpus=tres.get("gres/gpu", 0),
        preempt_mode=pairs.get("PreemptMode", ""),
        priority_tier=_first_number(pairs.get("PriorityTier", ""), 1),
        default=pairs.get("Default") == "YES",
    )


def notice_s(site: Site, placement: SlurmPlacement) -> float:
    """Say how long a job of a placement has between the stop notice and the kill.

    Args:
        site: the site.
        placement: names QoS and partition, and what the profile may ask for.

    Returns:
        Seconds: the profile's grace, the QoS's GraceTime (the partition's without QoS), whichever is shorter; where the
        latter is 0 every process gets its SIGTERM at once and has KillWait, less a margin for the end marker.
    """
    if site.accounting and site.preempt_type.endswith("qos"):
        grace_s = site.qos[placement.qos].grace_s if placement.qos in site.qos else 0
    else:
        grace_s = site.partitions[placement.partition].grace_s if placement.partition in site.partitions else 0
    allowed_s = float(grace_s) if grace_s else max(1.0, site.kill_wait_s - _MARGIN_S)
    return min(float(placement.grace_s), allowed_s)
