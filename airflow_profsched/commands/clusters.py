"""`profsched doctor`, `profsched jobs`, `profsched orphans`: questions to the clusters."""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from airflow_profsched.cluster import mailbox, workdir
from airflow_profsched.cluster.exchange import run
from airflow_profsched.cluster.transports import LocalSender
from airflow_profsched.core import units
from airflow_profsched.core.errors import PolicyError, ProfschedError, UnknownNameError
from airflow_profsched.core.jobs import FoundJob
from airflow_profsched.core.policy import SlurmCluster
from airflow_profsched.core.policyfile import Policy, nearest
from airflow_profsched.hooks.policy import load_policy
from airflow_profsched.hooks.slurm import SlurmHook
from airflow_profsched.slurm import cli
from airflow_profsched.slurm.site import Site, read_site


def _clusters(policy: Policy, only: str | None) -> Iterator[tuple[str, SlurmCluster]]:
    known = policy.file.clusters
    if only is not None and only not in known:
        raise UnknownNameError(f"there is no cluster {only!r} in {policy.path}: {nearest(only, known)}")
    for name, cluster in known.items():
        if isinstance(cluster, SlurmCluster) and only in (None, name):
            yield name, cluster


def _sender(conn_id: str) -> LocalSender:
    return SlurmHook(conn_id).get_conn()


# ------------------------------------------------------------------------------------------------ doctor


def doctor(args: argparse.Namespace) -> int:
    """Say what this host can reach, and what is missing.

    Args:
        args: `policy`, `write_policy`, `work_dir`.

    Returns:
        0 where nothing is missing, else 1.

    Raises:
        ProfschedError: no policy could be drafted.
    """
    if args.write_policy:
        return _draft(Path(args.write_policy), args.work_dir)
    policy = load_policy(args.policy)
    print(f"policy: {policy.path}: profiles {', '.join(policy.file.profiles)}")
    faults = 0
    for name, cluster in _clusters(policy, None):
        for fault in _checked(policy, name, cluster):
            faults += 1
            print(f"  ! {fault}")
    others = [name for name, cluster in policy.file.clusters.items() if not isinstance(cluster, SlurmCluster)]
    if others:
        print(f"not looked at (this version speaks to Slurm alone): {', '.join(others)}")
    if not policy.file.clusters:
        faults += 1
        print("  ! the policy names no cluster: draft one with profsched doctor --write-policy FILE")
    print("nothing is missing" if not faults else f"{faults} thing(s) to mend")
    return 1 if faults else 0


def _checked(policy: Policy, name: str, cluster: SlurmCluster) -> Iterator[str]:
    print(f"cluster {name} ({policy.where('clusters', name)}):")
    try:
        workdir.check_work_dir(cluster.work_dir, name)
    except ProfschedError as error:
        yield str(error)
    try:
        site = run(read_site(), _sender(cluster.conn_id))
    except ProfschedError as error:
        yield str(error)
        return
    print(f"  {site.words()}")
    for profile, own in cluster.profiles.items():
        place = policy.where("clusters", name, "profiles", profile)
        if own.qos and site.accounting and own.qos not in site.qos:
            yield f"{place}: there is no QoS {own.qos!r}: {nearest(own.qos, site.qos)}"
        if own.qos and not site.accounting:
            yield f"{place}: QoS {own.qos!r} is named, but the site has no accounting, so no QoS: leave it away"
        if own.partition and own.partition not in site.partitions:
            yield f"{place}: there is no partition {own.partition!r}: {nearest(own.partition, site.partitions)}"
    yield from _preemption(site)


def _preemption(site: Site) -> Iterator[str]:
    if "none" in site.preempt_type or not site.preempt_type:
        yield "PreemptType is preempt/none: nothing is ever preempted here, so inference waits for trainings to end"
    if "SUSPEND" in site.preempt_mode:
        yield "PreemptMode SUSPEND: a suspended training keeps its GPUs, so it helps no inference; choose REQUEUE or CANCEL"


def _draft(place: Path, work_dir: str) -> int:
    site = run(read_site(), _sender(SlurmHook.default_conn_name))
    training, inference = _pair(site)
    text = (
        "version: 1\n"
        "clusters:\n"
        f"  {site.cluster or 'slurm'}:\n"
        "    kind: slurm\n"
        f"    work_dir: {work_dir}\n"
        f"    profiles: {{training: {_flow(training)}, inference: {_flow(inference)}}}\n"
    )
    load_policy_text(text, str(place))
    try:
        with place.open("x", encoding="utf-8") as out:
            out.write(text)
    except FileExistsError:
        raise PolicyError(f"{place} is there already and is left untouched: name a new file") from None
    except OSError as error:
        raise PolicyError(f"{place} cannot be written: {error.strerror}") from error
    print(f"{site.words()}\nwrote {place}: read it, then check it with: profsched doctor --policy {place}")
    return 0


def load_policy_text(text: str, path: str) -> Policy:
    """Read a policy that was just made, so that no wrong one is ever written."""
    from airflow_profsched.core.policyfile import load_policy as load  # noqa: PLC0415 - the name is taken above

    return load(text, path)


def _pair(site: Site) -> tuple[dict[str, str], dict[str, str]]:
    """Choose what trainings and inferences use: the QoS that preempts another, or the partition of a higher tier."""
    preempting = [(name, qos) for name, qos in site.qos.items() if qos.preempt]
    train, infer = _partition(site, "train"), _partition(site, "infer")
    if preempting:
        name, qos = max(preempting, key=lambda pair: pair[1].priority)
        return _place(qos.preempt[0], train), _place(name, infer)
    tiers = sorted(site.partitions, key=lambda name: site.partitions[name].priority_tier)
    if tiers and site.partitions[tiers[0]].priority_tier < site.partitions[tiers[-1]].priority_tier:
        return _place("", tiers[0]), _place("", tiers[-1])
    return _place("", train), _place("", infer)


def _partition(site: Site, like: str) -> str:
    named = [name for name in site.partitions if name.startswith(like)]
    default = [name for name, partition in site.partitions.items() if partition.default]
    return next(iter([*named, *default]), "")


def _place(qos: str, partition: str) -> dict[str, str]:
    return {name: value for name, value in (("qos", qos), ("partition", partition)) if value}


def _flow(place: dict[str, str]) -> str:
    return "{" + ", ".join(f"{name}: {json.dumps(value)}" for name, value in place.items()) + "}"


# ------------------------------------------------------------------------------------------------ jobs


def _live(policy: Policy, only: str | None) -> Iterator[tuple[str, SlurmCluster, FoundJob]]:
    for name, cluster in _clusters(policy, only):
        for job in run(cli.ours(), _sender(cluster.conn_id)):
            yield name, cluster, job


def jobs(args: argparse.Namespace) -> int:
    """List the live jobs that this user's Airflow has submitted.

    Args:
        args: `policy`, `cluster`, `json`.

    Returns:
        The exit status.
    """
    _show([(name, job) for name, _, job in _live(load_policy(args.policy), args.cluster)], as_json=args.json)
    return 0


def _show(found: list[tuple[str, FoundJob]], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([{"cluster": name, **asdict(job)} for name, job in found], indent=2))
        return
    for name, job in found:
        since = "" if job.submit_s is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(job.submit_s))
        print(f"{name}\t{job.job_id}\t{job.name}\tattempt {job.attempt}\t{job.profile}\t{job.state.value}\t{since}")
    if not found:
        print("there are none")


def orphans(args: argparse.Namespace) -> int:
    """List live jobs that nobody waits for, and cancel them where that is asked.

    Args:
        args: `policy`, `cluster`, `json`, `cancel`, `force`, `after`, `airflow`.

    Returns:
        The exit status.

    Raises:
        PolicyError: Airflow cannot be asked, so nothing is cancelled.
    """
    try:
        after_s = units.seconds(args.after)
    except ValueError as error:
        raise PolicyError(f"--after: {error}") from error
    found = [row for row in _live(load_policy(args.policy), args.cluster) if _unwatched(row[1], row[2], after_s)]
    wanted = _wanted(args.airflow)
    if wanted is not None:
        found = [row for row in found if row[2].name not in wanted]
    _show([(name, job) for name, _, job in found], as_json=args.json)
    if not args.cancel or not found:
        return 0
    if wanted is None and not args.force:
        raise PolicyError(
            "nothing is cancelled, since Airflow could not be asked whether it still wants these jobs: "
            "give --airflow URL (and AIRFLOW_TOKEN), or --force"
        )
    for name, cluster, job in found:
        run(cli.cancel(job.job_id), _sender(cluster.conn_id))
        print(f"cancelled job {job.job_id} on {name}")
    return 0


def _unwatched(cluster: SlurmCluster, job: FoundJob, after_s: float) -> bool:
    now_s = time.time()
    young = job.submit_s is not None and now_s - job.submit_s < after_s
    return not young and job.name not in mailbox.watched_names(cluster.work_dir, now_s, after_s)


def _wanted(address: str | None) -> set[str] | None:
    """The names of jobs whose task instances are running or deferred; None where Airflow gives no answer."""
    from airflow_profsched.core.jobs import TaskKey  # noqa: PLC0415 - here only

    if not address:
        return None
    names: set[str] = set()
    try:
        for row in _task_instances(address):
            index = row.get("map_index", -1)
            names.add(TaskKey(row["dag_id"], row["dag_run_id"], row["task_id"], index, _instance()).name)
    except (OSError, ValueError, KeyError, TypeError) as error:
        print(f"Airflow at {address} gives no answer: {error}")
        return None
    return names


def _instance() -> str:
    from airflow.providers.common.compat.sdk import conf  # noqa: PLC0415 - here only

    return str(conf.get("profsched", "instance", fallback=""))


def _task_instances(address: str) -> Iterator[dict[str, Any]]:
    headers = {"Accept": "application/json"}
    if os.environ.get("AIRFLOW_TOKEN"):
        headers["Authorization"] = f"Bearer {os.environ['AIRFLOW_TOKEN']}"
    offset, total = 0, 1
    while offset < total:
        states = [("state", state) for state in ("running", "deferred", "queued", "scheduled")]
        query = urllib.parse.urlencode([*states, ("limit", "100"), ("offset", str(offset))])
        url = f"{address.rstrip('/')}/api/v2/dags/~/dagRuns/~/taskInstances?{query}"
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{address} is no address of a web server")
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:  # noqa: S310
            body = json.load(answer)
        yield from body["task_instances"]
        total = int(body["total_entries"])
        offset += 100
