"""The configuration files of a throwaway Slurm."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from throwaway.slurm_options import Options

CPUS = 16
MEMORY_MIB = 64000


def write(directory: Path, options: Options, ports: list[int]) -> None:
    """Write slurm.conf, gres.conf, cgroup.conf and slurmdbd.conf into `directory/etc`.

    Args:
        directory: where the cluster lives.
        options: how it is set up.
        ports: of slurmctld, slurmdbd and MariaDB, then one per node.
    """
    etc = directory / "etc"
    nodes = [f"n{number}" for number in range(1, options.nodes + 1)]
    for node in nodes:
        for gpu in range(options.gpus):
            # A second /dev/null serves as a GPU's device: slurmd only looks whether it is one.
            os.mknod(directory / "dev" / f"{node}-g{gpu}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    lines = [*_common(directory, options, ports), *_accounting(directory, options, ports)]
    lines += [*_nodes(options, nodes, ports), *_partitions(options), *options.extra]
    (etc / "slurm.conf").write_text("\n".join(lines) + "\n", encoding="utf-8")
    kind = f" Type={options.gpu_type}" if options.gpu_type else ""
    gres = [f"NodeName={node} Name=gpu{kind} File={directory}/dev/{node}-g[0-{options.gpus - 1}]" for node in nodes]
    (etc / "gres.conf").write_text("\n".join(gres) + "\n", encoding="utf-8")
    (etc / "cgroup.conf").write_text("", encoding="utf-8")
    dbd = etc / "slurmdbd.conf"
    dbd.write_text("\n".join(_slurmdbd(directory, ports)) + "\n", encoding="utf-8")
    dbd.chmod(0o600)


def _common(directory: Path, options: Options, ports: list[int]) -> list[str]:
    quick = "SchedulerParameters=bf_interval=1,sched_interval=1,sched_min_interval=100000,batch_sched_delay=0"
    return [
        f"ClusterName=t{ports[0]}",
        f"SlurmctldHost={socket.gethostname().split('.')[0]}(127.0.0.1)",
        "SlurmUser=root",
        f"SlurmctldPort={ports[0]}",
        f"AuthInfo=socket={directory}/munge/socket",
        f"StateSaveLocation={directory}/state",
        f"SlurmdSpoolDir={directory}/spool-%n",
        f"SlurmctldPidFile={directory}/run/slurmctld.pid",
        f"SlurmdPidFile={directory}/run/slurmd-%n.pid",
        f"SlurmctldLogFile={directory}/log/slurmctld.log",
        f"SlurmdLogFile={directory}/log/slurmd-%n.log",
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "JobAcctGatherType=jobacct_gather/none",
        "MpiDefault=none",
        "SlurmdParameters=config_overrides",  # a node claims more CPUs than this machine has
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU_Memory",
        "DefMemPerCPU=100",
        "GresTypes=gpu",
        f"KillWait={options.kill_wait_s}",
        f"MinJobAge={options.min_job_age_s}",
        "ReturnToService=2",
        "SlurmctldTimeout=30",
        "SlurmdTimeout=30",
        "InactiveLimit=0",
        "PriorityType=priority/multifactor",
        "PriorityWeightQOS=10000",
        "PrologFlags=Alloc",
        *([quick] if options.quick else []),
    ]


def _accounting(directory: Path, options: Options, ports: list[int]) -> list[str]:
    if not options.accounting:
        return [
            "AccountingStorageType=accounting_storage/none",
            "PreemptType=preempt/partition_prio",
            "PreemptMode=REQUEUE",
        ]
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={ports[1]}",
        f"AccountingStoragePass={directory}/munge/socket",
        "AccountingStorageTRES=gres/gpu",
        "AccountingStorageEnforce=qos,limits",
        "PreemptType=preempt/qos",
        "PreemptMode=REQUEUE",
    ]


def _nodes(options: Options, nodes: list[str], ports: list[int]) -> list[str]:
    host = socket.gethostname().split(".")[0]
    gres = f"gpu:{options.gpu_type}:{options.gpus}" if options.gpu_type else f"gpu:{options.gpus}"
    return [
        f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3 + index]} CPUs={CPUS} "
        f"RealMemory={MEMORY_MIB} Gres={gres} Feature=a100,ib"
        for index, node in enumerate(nodes)
    ]


def _partitions(options: Options) -> list[str]:
    """`train`, `infer` and the default `all` share all nodes; who gives way is the QoS's affair, or by tier without any."""
    tiers = ("", "", "")
    if not options.accounting:
        gives_way = f"PreemptMode={options.preempt_mode} GraceTime={options.grace_s}"
        tiers = (f"PriorityTier=1 {gives_way}", "PriorityTier=10 PreemptMode=OFF", f"PriorityTier=5 {gives_way}")
    lines = [
        f"PartitionName=train Nodes=ALL MaxTime=UNLIMITED State=UP {tiers[0]}",
        f"PartitionName=infer Nodes=ALL MaxTime=UNLIMITED State=UP {tiers[1]}",
        f"PartitionName=all Nodes=ALL MaxTime=UNLIMITED State=UP Default=YES {tiers[2]}",
    ]
    return lines + [f"PartitionName={name} Nodes={where} State=UP" for name, where in options.partitions.items()]


def _slurmdbd(directory: Path, ports: list[int]) -> list[str]:
    return [
        "AuthType=auth/munge",
        f"AuthInfo=socket={directory}/munge/socket",
        "DbdHost=localhost",
        "DbdAddr=127.0.0.1",
        f"DbdPort={ports[1]}",
        "SlurmUser=root",
        f"PidFile={directory}/run/slurmdbd.pid",
        f"LogFile={directory}/log/slurmdbd.log",
        "StorageType=accounting_storage/mysql",
        "StorageHost=127.0.0.1",
        f"StoragePort={ports[2]}",
        "StorageUser=slurm",
        "StoragePass=slurm",
        "StorageLoc=slurm_acct_db",
        "CommitDelay=0",
    ]


def mariadb_install(directory: Path) -> list[str]:
    """Return the command that makes MariaDB's system tables; half a second.

    Args:
        directory: where the cluster lives.

    Returns:
        The argument vector.
    """
    return [
        "mariadb-install-db",
        "--no-defaults",
        "--user=mysql",
        f"--datadir={directory}/mysql",
        f"--tmpdir={directory}/mysql-tmp",  # a MariaDB that starts removes all #sql* files of its tmpdir, a neighbour's as well
        "--skip-test-db",
        "--auth-root-authentication-method=normal",
        "--innodb-log-file-size=16M",
    ]


def mariadb(directory: Path, port: int) -> list[str]:
    """Return the command of a private MariaDB.

    Args:
        directory: where the cluster lives.
        port: on the loopback interface.

    Returns:
        The argument vector. It listens on the loopback interface alone, and asks nobody for a password.
    """
    return [
        "mariadbd",
        "--no-defaults",
        f"--datadir={directory}/mysql",
        f"--tmpdir={directory}/mysql-tmp",
        f"--socket={directory}/mysql/socket",
        f"--pid-file={directory}/mysql/pid",
        f"--port={port}",
        "--bind-address=127.0.0.1",
        "--skip-grant-tables",
        "--skip-networking=0",  # skip-grant-tables would switch it on
        "--innodb-buffer-pool-size=64M",
        "--innodb-log-file-size=16M",
        "--innodb-lock-wait-timeout=900",  # slurmdbd asks for it
        "--innodb-flush-log-at-trx-commit=0",
    ]
