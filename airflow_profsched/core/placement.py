"""From a task's request to a placement: which profile, which cluster, and everything the submission needs."""

from __future__ import annotations

import fnmatch
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from airflow_profsched.core import units
from airflow_profsched.core.errors import NotAllowedError, PolicyError, UnknownNameError
from airflow_profsched.core.policy import SlurmCluster, SlurmProfile
from airflow_profsched.core.policyfile import Policy, nearest
from airflow_profsched.core.profiles import Budgets, Checkpoint, Model, Resources, Word, WorkloadProfile, plain_word

_COMPARE: dict[str, Callable[[int, int], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
    "==": operator.eq,
}
_SHORTEST_S = 60  # Slurm counts a walltime limit in minutes


@dataclass(frozen=True, slots=True)
class TaskRequest:
    """What a task asks for.

    Args:
        resources: what it needs.
        profile: the profile it names; None: the policy's rules decide.
        checkpoint: how it writes checkpoints; None: as the profile says.
        cluster: the cluster it pins; None: the policy's routes decide.
        project: whose budget it is charged to.
        overrides: what it sets beside its profile, by kind of cluster.
        dag_id: its DAG.
        task_id: its id.
        owner: its owner, as Airflow knows it.
        dag_tags: its DAG's tags.
        image: the container image.
        budgets: its own budgets; None: the profile's.
    """

    resources: Resources
    profile: str | None = None
    checkpoint: Checkpoint | None = None
    cluster: str | None = None
    project: str | None = None
    overrides: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    dag_id: str = ""
    task_id: str = ""
    owner: str = ""
    dag_tags: tuple[str, ...] = ()
    image: str = ""
    budgets: Budgets | None = None


class SlurmPlacement(Model):
    """What the policy decided for a task on a Slurm cluster; durations in seconds.

    `reasons` says in words, step by step, what decided.
    """

    kind: Literal["slurm"] = "slurm"
    cluster: str
    conn_id: str
    work_dir: str
    profile: str
    preemptible: bool
    resources: Resources
    walltime_s: int
    grace_s: int
    checkpointed: bool
    partition: Word = ""
    qos: Word = ""
    account: Word = ""
    constraint: Word = ""
    signal: Word = ""
    gpu_form: Literal["gres", "gpus", "gpus-per-node"] = "gres"
    gpu_type: Word = ""
    setup: tuple[str, ...] = ()
    login_shell: bool = False
    layout: str = ""
    checkpoint_dir: str = ""
    checkpoint_interval_s: float | None = None
    budgets: Budgets = Budgets()
    overrides: tuple[tuple[str, Word], ...] = ()
    poll_interval_s: int = 30
    keep_s: int = 14 * 86400
    files_group: str = ""
    files_umask: int = 0o077
    node_lost_after_s: int = 300
    reasons: tuple[str, ...] = ()

    @property
    def stop_signal(self) -> str:
        """The signal that the program gets, without `SIG`."""
        return self.signal.partition("@")[0] or "TERM"

    @property
    def walltime_notice_s(self) -> float | None:
        """How long before the walltime limit a notice comes; None where none was asked for."""
        return float(self.signal.partition("@")[2]) if self.signal else None

    def to_json(self) -> dict[str, Any]:
        """Turn it into plain JSON, for a trigger's arguments."""
        return self.model_dump(mode="json", exclude={"reasons"}, exclude_defaults=True)

    @classmethod
    def from_json(cls, body: Mapping[str, Any]) -> SlurmPlacement:
        """Read what :meth:`to_json` wrote."""
        return cls.model_validate(body)


Placement = SlurmPlacement


def resolve(policy: Policy, request: TaskRequest) -> Placement:
    """Decide where and how a task runs.

    Args:
        policy: the policy.
        request: what the task asks for.

    Returns:
        The placement, with the reasons in words.

    Raises:
        UnknownNameError: a profile, cluster, project or GPU type that the policy does not know.
        NotAllowedError: the policy says no.
    """
    name, why_profile = _profile(policy, request)
    profile = policy.file.profiles[name]
    _check_right(policy, request, name, profile)
    _check_size(policy, request, name, profile)
    cluster_name, why_cluster = _cluster(policy, request, name)
    cluster = policy.file.clusters[cluster_name]
    if not isinstance(cluster, SlurmCluster):
        msg = (
            f"{_task(request)}: cluster {cluster_name} is of kind {cluster.kind}, and this version submits to Slurm alone "
            f"({policy.where('clusters', cluster_name)}): route profile {name} to a Slurm cluster"
        )
        raise NotAllowedError(msg)
    return _Slurm(policy, request, name, profile, cluster_name, cluster).place((why_profile, why_cluster))


def _task(request: TaskRequest) -> str:
    return f"task {request.dag_id}.{request.task_id}" if request.dag_id else "the task"


# ------------------------------------------------------------------------------------------------ profile


def _profile(policy: Policy, request: TaskRequest) -> tuple[str, str]:
    known = policy.file.profiles
    if request.profile is not None:
        if request.profile not in known:
            msg = f"{_task(request)}: there is no profile {request.profile!r} in {policy.path}: {nearest(request.profile, known)}"
            raise UnknownNameError(msg)
        return request.profile, f"profile {request.profile}: named by the task"
    for index, rule in enumerate(policy.file.rules):
        if _matches(rule.when.gpus_total, rule.when.dag_tag, request):
            return rule.profile, f"profile {rule.profile}: rule {index + 1} ({policy.where('rules', index)})"
    msg = f"{_task(request)} names no profile, and no rule of {policy.path} matches it: give it profile=, or add a rule"
    raise UnknownNameError(msg)


def _matches(gpus_total: str | None, dag_tag: str | None, request: TaskRequest) -> bool:
    if dag_tag is not None and dag_tag not in request.dag_tags:
        return False
    if gpus_total is None:
        return True
    sign, number = re.findall(r">=|<=|==|>|<|\d+", gpus_total)
    return _COMPARE[sign](request.resources.gpus_total, int(number))


def _check_right(policy: Policy, request: TaskRequest, name: str, profile: WorkloadProfile) -> None:
    allowed = profile.allowed
    if allowed is None or not (allowed.owners or allowed.dag_ids):
        return
    by_owner = any(fnmatch.fnmatchcase(request.owner, pattern) for pattern in allowed.owners)
    by_dag = any(fnmatch.fnmatchcase(request.dag_id, pattern) for pattern in allowed.dag_ids)
    if not by_owner and not by_dag:
        who = f"owners {', '.join(allowed.owners) or '(none)'}; DAGs {', '.join(allowed.dag_ids) or '(none)'}"
        where = policy.where("profiles", name, "allowed")
        msg = (
            f"{_task(request)} of owner {request.owner or '(none)'} may not choose profile {name}: "
            f"{where} allows {who}. Ask the operator of the policy, or choose another profile"
        )
        raise NotAllowedError(msg)


def _check_size(policy: Policy, request: TaskRequest, name: str, profile: WorkloadProfile) -> None:
    total = request.resources.gpus_total
    shape = f"{request.resources.nodes} nodes x {request.resources.gpus} GPUs = {total}"
    where = policy.where("profiles", name, "gpus")
    if total < profile.gpus.min:
        msg = f"{_task(request)} asks for {shape}, but profile {name} begins at {profile.gpus.min} GPUs ({where})"
        raise NotAllowedError(msg)
    if profile.gpus.max is not None and total > profile.gpus.max:
        msg = (
            f"{_task(request)} asks for {shape}, but profile {name} may have {profile.gpus.max} over all nodes ({where}): "
            "ask for fewer, or choose another profile"
        )
        raise NotAllowedError(msg)
    wanted, most = request.resources.walltime, profile.walltime.max
    if wanted is not None and most is not None and wanted > most:
        msg = (
            f"{_task(request)} asks for a walltime of {units.words(wanted)}, but profile {name} may have "
            f"{units.words(most)} ({policy.where('profiles', name, 'walltime')}): ask for less, and checkpoint"
        )
        raise NotAllowedError(msg)


# ------------------------------------------------------------------------------------------------ cluster


def _cluster(policy: Policy, request: TaskRequest, profile: str) -> tuple[str, str]:
    clusters = policy.file.clusters
    if request.cluster is not None:
        if request.cluster not in clusters:
            msg = f"{_task(request)}: there is no cluster {request.cluster!r} in {policy.path}: {nearest(request.cluster, clusters)}"
            raise UnknownNameError(msg)
        if profile not in clusters[request.cluster].profiles:
            raise NotAllowedError(_not_served(policy, request, request.cluster, profile))
        return request.cluster, f"cluster {request.cluster}: pinned by the task"
    for name, why in _routes(policy, profile):
        if profile in clusters[name].profiles:
            return name, why
    if not clusters:
        msg = f"{_task(request)}: the policy ({policy.path}) knows no cluster: name one (see [profsched] policy_file)"
        raise UnknownNameError(msg)
    raise NotAllowedError(_not_served(policy, request, ", ".join(clusters), profile))


def _routes(policy: Policy, profile: str) -> Iterator[tuple[str, str]]:
    targets = policy.file.routes.get(profile)
    if targets is None:
        for name in policy.file.clusters:
            yield name, f"cluster {name}: the first that lists profile {profile} (no route is given)"
        return
    for index, target in enumerate(targets):
        if isinstance(target, str):  # an overflow (`when`) has no effect yet
            yield target, f"cluster {target}: {policy.where('routes', profile, index)}"


def _not_served(policy: Policy, request: TaskRequest, name: str, profile: str) -> str:
    return (
        f"{_task(request)}: cluster {name} does not take profile {profile} "
        f"({policy.where('clusters', name, 'profiles')}): add clusters.NAME.profiles.{profile}, or choose another cluster"
    )


# ------------------------------------------------------------------------------------------------ Slurm


@dataclass(frozen=True, slots=True)
class _Slurm:
    policy: Policy
    request: TaskRequest
    name: str
    profile: WorkloadProfile
    cluster_name: str
    cluster: SlurmCluster

    def place(self, reasons: tuple[str, ...]) -> SlurmPlacement:
        """Put everything together."""
        own = self.cluster.profiles[self.name]
        walltime_s, why_walltime = self._walltime()
        account, why_account = self._account(own)
        checkpoint = self.request.checkpoint or Checkpoint()
        checkpointed = self.profile.checkpoint.required or self.request.checkpoint is not None
        place = f"{self.policy.where('clusters', self.cluster_name, 'profiles', self.name)}"
        given = {"QoS": own.qos, "partition": own.partition, "constraint": own.constraint}
        named = [f"{what} {value}: {place}" for what, value in given.items() if value]
        try:
            return SlurmPlacement(
                cluster=self.cluster_name,
                conn_id=self.cluster.conn_id,
                work_dir=self.cluster.work_dir,
                profile=self.name,
                preemptible=self.profile.preemptible,
                resources=self.request.resources,
                walltime_s=walltime_s,
                grace_s=self.profile.grace,
                checkpointed=checkpointed,
                partition=own.partition,
                qos=own.qos,
                account=account,
                constraint=own.constraint,
                signal=own.signal or self._default_signal(checkpointed=checkpointed, walltime_s=walltime_s),
                gpu_form=self.cluster.gpu_form,
                gpu_type=self._gpu_type(),
                setup=self.cluster.setup,
                login_shell=self.cluster.login_shell,
                layout=checkpoint.layout,
                checkpoint_dir=checkpoint.dir,
                checkpoint_interval_s=self.profile.checkpoint.interval_s if checkpointed else None,
                budgets=self.request.budgets or self.profile.budgets,
                overrides=tuple(self._overrides()),
                poll_interval_s=self.cluster.poll_interval,
                keep_s=self.cluster.keep,
                files_group=self.cluster.files.group,
                files_umask=int(self.cluster.files.umask, 8),
                node_lost_after_s=self.cluster.node_lost_after,
                reasons=(*reasons, *named, why_walltime, *why_account, *self._image()),
            )
        except ValidationError as error:
            raise PolicyError(f"{_task(self.request)}: {error}") from error

    def _walltime(self) -> tuple[int, str]:
        asked = self.request.resources.walltime
        if asked is not None:
            return max(asked, _SHORTEST_S), f"walltime {units.words(asked)}: asked for by the task"
        default = self.profile.walltime.default
        where = self.policy.where("profiles", self.name, "walltime")
        return default, f"walltime {units.words(default)}: the profile's default ({where})"

    def _default_signal(self, *, checkpointed: bool, walltime_s: int) -> str:
        """A walltime limit is a stop like any other: whoever checkpoints hears of it in time."""
        notice_s = min(self.profile.grace, walltime_s // 2, 65535)
        return f"TERM@{notice_s}" if checkpointed and self.profile.preemptible and notice_s else ""

    def _account(self, own: SlurmProfile) -> tuple[str, tuple[str, ...]]:
        projects, asked = self.cluster.projects, self.request.project
        where = self.policy.where("clusters", self.cluster_name, "projects")
        if asked is not None and asked not in projects:
            msg = f"{_task(self.request)}: there is no project {asked!r} on cluster {self.cluster_name} ({where}): {nearest(asked, projects)}"
            raise UnknownNameError(msg)
        name = asked if asked is not None else "default"
        if name in projects:
            account = projects[name].account
            return account, (f"account {account}: project {name} ({where})",)
        return own.account, ()

    def _gpu_type(self) -> str:
        asked, known = self.request.resources.gpu_type, self.cluster.gpu_types
        if not asked or not known:
            return asked
        if asked in known:
            return known[asked]
        where = self.policy.where("clusters", self.cluster_name, "gpu_types")
        msg = f"{_task(self.request)}: there is no GPU type {asked!r} on cluster {self.cluster_name} ({where}): {nearest(asked, known)}"
        raise UnknownNameError(msg)

    def _overrides(self) -> Iterator[tuple[str, str]]:
        for name, value in self.request.overrides.get("slurm", {}).items():
            if name not in self.cluster.overrides:
                where = self.policy.where("clusters", self.cluster_name, "overrides")
                msg = (
                    f"{_task(self.request)} sets {name!r} beside its profile, which cluster {self.cluster_name} does not let a "
                    f"DAG do ({where}): {nearest(name, self.cluster.overrides)}"
                )
                raise NotAllowedError(msg)
            try:
                yield name, plain_word(str(value))
            except ValueError as error:
                raise NotAllowedError(f"{_task(self.request)}: override {name}: {error}") from error

    def _image(self) -> tuple[str, ...]:
        where = self.policy.where("clusters", self.cluster_name)
        if self.cluster.image_required and not self.request.image:
            msg = f"{_task(self.request)}: cluster {self.cluster_name} runs containers alone ({where}): give it image="
            raise NotAllowedError(msg)
        if not self.request.image:
            return ()
        if self.cluster.image_required or self.cluster.container.runtime != "none":
            msg = f"{_task(self.request)}: this version does not run images on Slurm yet ({where}): leave image= away"
            raise NotAllowedError(msg)
        return (f"image {self.request.image}: left out, cluster {self.cluster_name} runs no containers ({where})",)
