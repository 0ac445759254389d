"""A whole Slurm in one temporary directory: controller, nodes with fake GPUs, accounting, munge.

As a command, for trying things by hand::

    python3 -m throwaway.slurm up          # prints what to export
    python3 -m throwaway.slurm down DIR
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from throwaway import packages, slurm_conf, users
from throwaway.packages import Unavailable

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
ACCOUNT = "ml"


@dataclass
class Options:
    """How a throwaway Slurm is set up.

    Args:
        nodes: how many slurmd.
        gpus: fake GPUs per node.
        accounting: slurmdbd with MariaDB, and preemption by QoS; else by partition priority.
        quick: scheduler intervals of a second; False: Slurm's own defaults, for benchmarks.
        kill_wait_s: seconds between SIGTERM and SIGKILL.
        min_job_age_s: how long the controller keeps an ended job.
        qos: QoS by name, with sacctmgr's settings.
        partitions: further partitions by name, with their nodes (`n[3-4]`).
        extra: further lines of slurm.conf.
        grace_s: GraceTime of partition `train`, without accounting.
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


class ThrowawaySlurm:
    """A Slurm of its own; a context manager.

    Args:
        options: how it is set up.
        directory: where it lives; None: a new directory below /tmp.
        user: the ordinary user whose jobs it runs; a second one, :data:`users.OTHER`, may submit as well.

    Raises:
        Unavailable: this machine cannot have it; the message says why.
    """

    def __init__(
        self, options: Options | None = None, *, directory: Path | None = None, user: str = users.USER
    ) -> None:
        self.options = options or Options()
        self.user = user
        self._directory = directory
        self.pids: dict[str, int] = {}
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    # ------------------------------------------------------------------------------------------------ life

    def __enter__(self) -> Self:
        """Bring it up."""
        return self.up()

    def __exit__(self, *_: object) -> None:
        """Take it down."""
        self.down()

    @property
    def dir(self) -> Path:
        """The directory it lives in."""
        assert self._directory is not None, "not up"
        return self._directory

    @property
    def work_dir(self) -> Path:
        """A directory of the ordinary user's, which all nodes share."""
        return self.dir / "work"

    def up(self) -> Self:
        """Start everything and wait until the nodes are idle.

        Returns:
            Itself.

        Raises:
            Unavailable: this machine cannot have it.
            RuntimeError: a part did not come up; the message ends with the logs.
        """
        if os.geteuid() != 0:
            raise Unavailable("a throwaway Slurm needs root: its daemons start jobs as other users")
        packages.ensure(packages.SLURM)
        for name in (self.user, users.OTHER):
            users.ensure(name)
        self._lay_out()
        try:
            self._start_all()
        except BaseException:
            self.down()
            raise
        (self.dir / "pids.json").write_text(json.dumps(self.pids), encoding="utf-8")
        return self

    def _lay_out(self) -> None:
        self._directory = self._directory or Path(tempfile.mkdtemp(prefix="slurm-"))
        self.dir.mkdir(parents=True, exist_ok=True)
        self.dir.chmod(0o755)
        self.ports = free_ports(self.options.nodes + 3)
        entry = users.ensure(self.user)
        for name in ("etc", "log", "run", "munge", "state", "dev", "mysql", "work"):
            (self.dir / name).mkdir(exist_ok=True)
        for path, mode in (("munge", 0o711), ("work", 0o700), ("etc", 0o755)):
            (self.dir / path).chmod(mode)
        os.chown(self.work_dir, entry.pw_uid, entry.pw_gid)
        shutil.chown(self.dir / "mysql", "mysql", "mysql")
        key = self.dir / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        slurm_conf.write(self.dir, self.options, self.ports)

    def _start_all(self) -> None:
        self.start("munged")
        if self.options.accounting:
            # slurmdbd needs stored procedures, and they need the system tables: an empty directory would lose users in silence.
            _checked(slurm_conf.mariadb_install(self.dir))
            self.start("mariadb")
            self.start("slurmdbd")
            # Once before there are accounts, so that the cluster and its TRES are known; a slurmctld 22.05 that goes on
            # through the making of the first association may crash in its fair share tree.
            self.start("slurmctld")
            self._wait("the cluster in accounting", self._known_gpu, 30)
            self.kill("slurmctld")
            self._make_accounts()
        self.start("slurmctld")
        for node in self.nodes:
            self.start(node)
        self._wait("the nodes to be idle", self._nodes_idle, 30)

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes' names."""
        return tuple(f"n{number}" for number in range(1, self.options.nodes + 1))

    def _nodes_idle(self) -> bool:
        states = self.command("sinfo", "-h", "-N", "-o", "%N %t", user="root").stdout.split("\n")
        return {line.split()[0] for line in states if line.endswith(" idle")} == set(self.nodes)

    def _make_accounts(self) -> None:
        for name in self.options.qos:
            self._sacctmgr("add", "qos", name)
        names = ",".join(("normal", *self.options.qos))
        self._sacctmgr("add", "account", ACCOUNT)
        for user in (self.user, users.OTHER):
            self._sacctmgr("add", "user", user, f"account={ACCOUNT}", f"defaultaccount={ACCOUNT}", f"qos={names}")
        self.reset_qos()

    def _known_gpu(self) -> bool:
        known = self.command("sacctmgr", "-nP", "show", "tres", "format=type,name", user="root").stdout
        clusters = self.command("sacctmgr", "-nP", "show", "cluster", "format=cluster,controlport", user="root").stdout
        return "gres|gpu" in known and f"t{self.ports[0]}|" in clusters

    def reset_qos(self) -> None:
        """Give every QoS the settings it was made with."""
        for name, settings in self.options.qos.items():
            self.modify_qos(name, **settings)

    def modify_qos(self, name: str, **settings: str) -> None:
        """Change a QoS.

        Args:
            name: the QoS.
            settings: sacctmgr's, such as `GraceTime="0"`.
        """
        self._sacctmgr("modify", "qos", name, "set", *(f"{key}={value}" for key, value in settings.items()))

    def _sacctmgr(self, *words: str) -> None:
        done = self.command("sacctmgr", "-i", *words, user="root")
        if done.returncode and "Nothing modified" not in done.stdout + done.stderr:
            raise RuntimeError(f"sacctmgr {' '.join(words)} exited {done.returncode}: {done.stdout}{done.stderr}")

    def down(self) -> None:
        """Stop everything this cluster has started, jobs as well, and remove its directory."""
        if self._directory is None:
            return
        for part in ("slurmctld", *self.nodes, "slurmdbd", "mariadb", "munged"):
            self.kill(part, signal.SIGTERM if part == "mariadb" else signal.SIGKILL)
        _kill_everything_of(self._directory)
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = None

    # ------------------------------------------------------------------------------------------------ parts

    def start(self, part: str) -> None:
        """Start a part and wait until it serves.

        Args:
            part: `munged`, `mariadb`, `slurmdbd`, `slurmctld`, or a node's name.
        """
        argv, user = self._argv(part)
        options: dict[str, Any] = users.run_as(user, self.env())
        with (self.dir / "log" / f"{part}.out").open("ab") as out:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, **options
            )
        self._children[part], self.pids[part] = child, child.pid
        ready = self._ready(part)
        if ready is not None:
            self._wait(f"{part} to serve", ready, 30)

    def _argv(self, part: str) -> tuple[list[str], str | None]:
        conf, directory = str(self.dir / "etc" / "slurm.conf"), self.dir
        if part == "munged":
            names = (
                ("key-file", "key"),
                ("socket", "socket"),
                ("pid-file", "pid"),
                ("log-file", "log"),
                ("seed-file", "seed"),
            )
            paths = [f"--{option}={directory}/munge/{name}" for option, name in names]
            return ["munged", "--foreground", "--force", *paths], None
        if part == "mariadb":
            return slurm_conf.mariadb(directory, self.ports[2]), "mysql"
        if part == "slurmdbd":
            return ["slurmdbd", "-D"], None
        if part == "slurmctld":
            return ["slurmctld", "-D", "-f", conf], None
        return ["slurmd", "-D", "-f", conf, "-N", part], None

    def _ready(self, part: str) -> Callable[[], bool] | None:
        ports = {"slurmctld": self.ports[0], "slurmdbd": self.ports[1], "mariadb": self.ports[2]}
        if part == "munged":
            return (self.dir / "munge" / "socket").exists
        if part in ports:
            return lambda: _listens(ports[part])
        return None

    def kill(self, part: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to a part, and wait for its end where that signal ends it.

        Args:
            part: as :meth:`start`.
            number: the signal.
        """
        pid, child = self.pids.get(part), self._children.get(part)
        if pid is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)
        if number in (signal.SIGSTOP, signal.SIGCONT):
            return
        if child is not None:
            child.wait(timeout=30)
        del self.pids[part]

    def restart(self, part: str) -> None:
        """Stop a part properly and start it again."""
        self.kill(part, signal.SIGTERM)
        self.start(part)

    def _wait(self, what: str, ready: Callable[[], bool], seconds: float) -> None:
        until = time.monotonic() + seconds
        while not ready():
            dead = [part for part, child in self._children.items() if part in self.pids and child.poll() is not None]
            if dead or time.monotonic() > until:
                why = f"{', '.join(dead)} ended" if dead else f"not within {seconds:.0f} s"
                raise RuntimeError(f"waiting for {what}: {why}\n{self.tail_logs()}")
            time.sleep(0.05)

    def tail_logs(self, lines: int = 15) -> str:
        """Return the last lines of every daemon's log."""
        tails = []
        for path in sorted((self.dir / "log").iterdir()):
            text = path.read_text(errors="replace").splitlines()[-lines:]
            tails.append("\n".join([f"--- {path.name}", *text]))
        return "\n".join(tails)

    # ------------------------------------------------------------------------------------------------ use

    def env(self) -> dict[str, str]:
        """Return the variables with which commands find this cluster."""
        return {"SLURM_CONF": str(self.dir / "etc" / "slurm.conf")}

    def command(
        self, *argv: str, user: str | None = None, stdin: str = "", timeout_s: float = 60
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this cluster.

        Args:
            argv: the command.
            user: as whom; the ordinary user by default.
            stdin: what it reads.
            timeout_s: how long it may take.

        Returns:
            What it did; its exit status is not checked.
        """
        options = users.run_as(user or self.user, self.env())
        return subprocess.run(
            argv, input=stdin, capture_output=True, text=True, check=False, timeout=timeout_s, cwd="/", **options
        )

    def cancel_all(self) -> None:
        """Cancel every job and wait until the nodes are free, so that tests can share one cluster."""
        for user in (self.user, users.OTHER):
            self.command("scancel", "--user", user, user="root")
        self._wait("the queue to be empty", lambda: not self.command("squeue", "-h", user="root").stdout.strip(), 90)


def free_ports(count: int) -> list[int]:
    """Return ports of the loopback interface that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _checked(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{argv[0]} exited {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _kill_everything_of(directory: Path) -> None:
    """End what no pid of ours names: slurmstepd and jobs. Everything of this cluster carries its SLURM_CONF."""
    mark = f"SLURM_CONF={directory}/".encode()
    for _ in range(50):
        left = [pid for pid in _pids() if mark in _environ(pid) and pid != os.getpid()]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environ(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""


def main(argv: Sequence[str] | None = None) -> None:
    """Bring a cluster up or take it down by hand.

    Args:
        argv: the arguments; None: the process's own.
    """
    parser = argparse.ArgumentParser(prog="python3 -m throwaway.slurm", description="A whole Slurm in one directory.")
    parser.add_argument("verb", choices=("up", "down"))
    parser.add_argument("directory", nargs="?", type=Path, help="where it lives (up: a new one below /tmp by default)")
    parser.add_argument("--no-accounting", action="store_true", help="partition priority instead of QoS")
    args = parser.parse_args(argv)
    try:
        _up(args) if args.verb == "up" else _down(args, parser)
    except Unavailable as error:
        sys.exit(str(error))


def _up(args: argparse.Namespace) -> None:
    slurm = ThrowawaySlurm(Options(accounting=not args.no_accounting), directory=args.directory)
    slurm.up()
    conf = slurm.env()["SLURM_CONF"]
    print(f"Slurm is up, with nodes {', '.join(slurm.nodes)} of {slurm.options.gpus} (fake) GPUs each.")
    print(f"Jobs are submitted by the user {slurm.user}; nodes share {slurm.work_dir}. In a shell of that user:\n")
    print(f"    su {slurm.user}\n    export SLURM_CONF={conf}\n    sinfo\n")
    print(f"It goes on until: python3 -m throwaway.slurm down {slurm.dir}")


def _down(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    if args.directory is None or not (args.directory / "pids.json").exists():
        parser.error("down needs the directory that up has named")
    slurm = ThrowawaySlurm(directory=args.directory)
    slurm.pids = json.loads((args.directory / "pids.json").read_text(encoding="utf-8"))
    slurm.down()


if __name__ == "__main__":
    main()
