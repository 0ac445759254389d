"""The policy file's models: what each profile may use, which cluster it goes to, when it overflows."""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from airflow_profsched.core.profiles import Duration, Model, Word, WorkloadProfile


def _one_line(text: str) -> str:
    if any((char < " " and char != "\t") or char == "\x7f" for char in text):
        raise ValueError(f"{text!r} must be one line without control characters")
    return text


def _signal(text: str) -> str:
    if text and not re.fullmatch(r"[A-Z][A-Z0-9]{1,9}@[0-9]{1,5}", text):
        raise ValueError(f"{text!r} must be a signal and seconds, such as TERM@120 (to the steps; B: is not for us)")
    return text


def _directory(text: str) -> str:
    if text and (not text.startswith("/") or ".." in text.split("/")):
        raise ValueError(f"{text!r} must be an absolute path without '..'")
    return posixpath.normpath(_one_line(text)) if text else text


def _umask(text: str) -> str:
    if not re.fullmatch(r"0?[0-7]{3}", text):
        raise ValueError(f'{text!r} is no umask: write three octal digits in quotes, such as "027"')
    return text


Text = Annotated[str, AfterValidator(_one_line)]
Directory = Annotated[str, AfterValidator(_directory)]
Signal = Annotated[str, AfterValidator(_signal)]


class SlurmProfile(Model):
    """How jobs of a profile are submitted to a Slurm cluster."""

    qos: Word = Field("", description="quality of service; empty where the site has none")
    partition: Word = Field("", description="partition; empty: the cluster's default")
    constraint: Word = Field("", description="node features, such as a100&ib")
    signal: Signal = Field("", description="a notice before the walltime limit, such as TERM@120")
    account: Word = Field("", description="account, where no project names another")


class Files(Model):
    """Who may read what is written into `work_dir`."""

    group: Word = Field("", description="group of the files; empty: the user's own")
    umask: Annotated[str, AfterValidator(_umask)] = Field("077", description="what is withheld, octal, in quotes")


class Container(Model):
    """How a cluster runs `image=`."""

    runtime: Literal["none", "pyxis", "apptainer", "oci"] = "none"


class Project(Model):
    """Whose budget a project's jobs are charged to."""

    account: Word


class SlurmQos(Model):
    """A QoS as the site should have it."""

    priority: int | None = Field(None, ge=0)
    grp_tres: dict[str, int] = Field(default_factory=dict)
    max_wall: Duration | None = None
    preempt: tuple[Word, ...] = ()
    preempt_mode: Literal["", "requeue", "cancel", "suspend", "off", "cluster"] = ""
    grace_time: Duration | None = None


class SlurmSite(Model):
    """What `policy apply` makes and `policy diff` compares on a Slurm site."""

    qos: dict[Word, SlurmQos] = Field(default_factory=dict)


class SlurmCluster(Model):
    """A Slurm cluster."""

    kind: Literal["slurm"]
    conn_id: str = Field("slurm_default", description="Airflow connection; slurm_default need not exist")
    work_dir: Directory = Field("", description="directory that the nodes and Airflow share")
    poll_interval: Duration = Field(30, description="seconds between two questions to the controller")
    keep: Duration = Field(14 * 86400, description="how long files of finished attempts are to be kept (no effect yet)")
    files: Files = Files()
    node_lost_after: Duration = Field(300, description="how long a job may be unknown to a cluster that answers")
    gpu_form: Literal["gres", "gpus", "gpus-per-node"] = Field("gres", description="the site's way to ask for GPUs")
    gpu_types: dict[str, Word] = Field(default_factory=dict, description="the DAG's word for a type: the site's")
    setup: tuple[Text, ...] = Field((), description="shell lines before the job, such as module load")
    login_shell: bool = Field(default=False, description="run the batch script in a login shell")
    container: Container = Container()
    image_required: bool = False
    profiles: dict[str, SlurmProfile] = Field(default_factory=dict)
    projects: dict[str, Project] = Field(default_factory=dict)
    overrides: tuple[Annotated[str, Field(pattern="^[a-z][a-z0-9_-]*$")], ...] = Field(
        (), description="sbatch options that a DAG may set beside its profile"
    )
    site: SlurmSite | None = None


class KubeProfile(Model):
    """How jobs of a profile are submitted to a Kubernetes cluster."""

    queue: str = ""
    priority_class: str = ""
    pod_priority_class: str = ""
    node_selector: dict[str, str] = Field(default_factory=dict)
    labels: dict[str, str] = Field(default_factory=dict)
    tolerations: tuple[dict[str, Any], ...] = ()


class Claim(Model):
    """A persistent volume claim that is mounted into pods."""

    claim: str
    mount: Directory
    read_only: bool = False


class PriorityClass(Model):
    """A priority class as the site should have it."""

    value: int
    preemption_policy: Literal["Never", "PreemptLowerPriority"] = "PreemptLowerPriority"
    description: str = ""


class KubeSite(Model):
    """What `policy apply` makes and `policy diff` compares on a Kubernetes site."""

    priority_classes: dict[str, PriorityClass] = Field(default_factory=dict)


class KubeCluster(Model):
    """A Kubernetes cluster: plain Jobs, Kueue or Volcano."""

    kind: Literal["kubernetes", "kueue", "volcano"]
    conn_id: str = "kubernetes_default"
    namespace: str = "default"
    image: str = ""
    work_dir: Claim | None = None
    volumes: tuple[Claim, ...] = ()
    gpu_resource: str = "nvidia.com/gpu"
    poll_interval: Duration = 30
    node_lost_after: Duration = 300
    profiles: dict[str, KubeProfile] = Field(default_factory=dict)
    projects: dict[str, Project] = Field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    site: KubeSite | None = None


class LocalCluster(Model):
    """Processes on Airflow's own host."""

    kind: Literal["local"]
    work_dir: Directory = ""
    profiles: dict[str, Model] = Field(default_factory=dict)


Cluster = Annotated[SlurmCluster | KubeCluster | LocalCluster, Field(discriminator="kind")]


class When(Model):
    """When an overflow is taken."""

    wait_over: Duration = Field(description="the task has waited longer than this")


class Detour(Model):
    """A cluster that is taken only under a condition."""

    to: str
    when: When


class Match(Model):
    """What a task must be like for a rule; all that is named must hold."""

    gpus_total: str | None = Field(None, pattern=r"^\s*(>=|<=|>|<|==)\s*\d{1,9}\s*$")
    dag_tag: str | None = None


class Rule(Model):
    """Which profile a task has that names none."""

    when: Match
    profile: str


class PolicyFile(Model):
    """The whole file."""

    version: Literal[1]
    profiles: dict[str, WorkloadProfile] = Field(default_factory=dict)
    clusters: dict[Annotated[str, Field(pattern="^[A-Za-z0-9][A-Za-z0-9_.-]{0,62}$")], Cluster] = Field(
        default_factory=dict
    )
    routes: dict[str, tuple[str | Detour, ...]] = Field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
