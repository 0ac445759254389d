"""What a task says of itself: resources, checkpoints, budgets; and what a workload profile is."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from airflow_profsched.core import units

Layout = Literal["", "manifest", "step"]

Duration = Annotated[
    int,
    BeforeValidator(units.seconds),
    WithJsonSchema({"type": ["string", "integer"], "description": "a duration: 90s, 2h30m, 7d, 1-12:00:00"}),
]
"""Seconds, read by :func:`units.seconds`."""


def plain_word(text: str) -> str:
    """Check a value that becomes a batch directive or a command's option.

    Args:
        text: the value.

    Returns:
        It.

    Raises:
        ValueError: it would be read as an option, or as more than one word.
    """
    bad = [char for char in text if not "!" <= char <= "~" or char in "\"'\\#`"]
    if bad:
        raise ValueError(f"{text!r} holds {bad[0]!r}: a value for the cluster is one word without blanks, quotes or #")
    if text.startswith("-"):
        raise ValueError(f"{text!r} begins with '-' and would be read as an option")
    return text


Word = Annotated[str, AfterValidator(plain_word)]
"""One word that may stand behind an option."""


class Model(BaseModel):
    """Base of what people write: frozen, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Resources(Model):
    """What a task needs, per node but for the walltime.

    Args:
        nodes: how many nodes.
        gpus: GPUs on each node; 0: none.
        gpu_type: their type, in the policy's word; empty: any.
        cpus: CPU cores on each node; None: the cluster's default.
        memory: memory on each node (`512Gi`); None: the cluster's default.
        walltime: how long it may run (`24h`); None: the profile's default.
        tasks_per_node: scheduler tasks on each node; 1 for torchrun, one per GPU for programs that want that.
    """

    nodes: int = Field(1, ge=1, le=100_000)
    gpus: int = Field(0, ge=0, le=1024)
    gpu_type: Word = ""
    cpus: int | None = Field(None, ge=1, le=100_000)
    memory: str | None = None
    walltime: Duration | None = None
    tasks_per_node: int = Field(1, ge=1, le=1024)

    @model_validator(mode="after")
    def _readable(self) -> Resources:
        if self.memory is not None:
            units.mebibytes(self.memory)
        return self

    @property
    def gpus_total(self) -> int:
        """GPUs over all nodes."""
        return self.nodes * self.gpus

    @property
    def mem_mib(self) -> int | None:
        """Memory on each node in MiB; None: the cluster's default."""
        return None if self.memory is None else units.mebibytes(self.memory)


class Checkpoint(Model):
    """How a program writes checkpoints.

    Args:
        layout: how a checkpoint looks (docs/reference/job-side.md); empty: it is found out.
        dir: where they lie, absolute; empty: below the cluster's `work_dir`.
        fresh_on_retry: start a user's retry from nothing instead of from the newest checkpoint.
    """

    layout: Layout = ""
    dir: str = ""
    fresh_on_retry: bool = False

    @model_validator(mode="after")
    def _absolute(self) -> Checkpoint:
        if self.dir and (not self.dir.startswith("/") or "\0" in self.dir or ".." in self.dir.split("/")):
            raise ValueError(f"dir {self.dir!r} must be an absolute path without '..'")
        return self


class Budgets(Model):
    """How much bad luck is borne before a task fails.

    Args:
        without_progress: resumes in a row without a newer checkpoint.
        unproven: resumes in a row whose checkpoint cannot be seen.
        deadline: how long the whole task may take, over all attempts; None: for ever.
    """

    without_progress: int = Field(3, ge=0)
    unproven: int = Field(20, ge=0)
    deadline: Duration | None = None

    @property
    def deadline_s(self) -> int | None:
        """The deadline in seconds."""
        return self.deadline


class GpuRange(Model):
    """How many GPUs a profile may have, over all nodes."""

    min: int = Field(0, ge=0)
    max: int | None = Field(None, ge=0)


class Walltime(Model):
    """How long a job of a profile runs, and may run."""

    default: Duration
    max: Duration | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Walltime:
        if self.max is not None and self.default > self.max:
            raise ValueError(f"default {units.words(self.default)} is longer than max {units.words(self.max)}")
        return self


class CheckpointRule(Model):
    """What a profile asks of checkpoints.

    Args:
        required: every task of the profile writes checkpoints.
        interval: the advised interval; `auto`: computed from `cost` and `between_preemptions`.
        cost: how long writing one takes.
        between_preemptions: the mean time between two preemptions.
    """

    required: bool = False
    interval: Literal["auto"] | Duration = "auto"
    cost: Duration = 60
    between_preemptions: Duration = 6 * 3600

    @property
    def interval_s(self) -> float:
        """The advised interval: sqrt(2·C·M) where it is `auto` (Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006)."""
        if self.interval != "auto":
            return float(self.interval)
        return float((2 * self.cost * self.between_preemptions) ** 0.5)


class Allowed(Model):
    """Who may choose a profile: to choose one that preempts is a right; names may hold `*` and `?`."""

    owners: tuple[str, ...] = ()
    dag_ids: tuple[str, ...] = ()


class WorkloadProfile(Model):
    """A kind of work.

    Args:
        objective: what it is scheduled for.
        gpus: how many GPUs it may have.
        walltime: how long it runs.
        preemptible: whether others may take its resources.
        grace: what it may ask for between stop notice and kill.
        checkpoint: what is asked of its checkpoints.
        budgets: how much bad luck is borne.
        allowed: who may choose it; everybody where it is not given.
    """

    objective: Literal["throughput", "latency"] = "throughput"
    gpus: GpuRange = GpuRange()
    walltime: Walltime
    preemptible: bool = False
    grace: Duration = 30
    checkpoint: CheckpointRule = CheckpointRule()
    budgets: Budgets = Budgets()
    allowed: Allowed | None = None
