"""A whole Slurm in one temporary directory: controller, nodes with fake GPUs, accounting, munge.

As a command, for trying things by hand::

    python3 -m throwaway.slurm up          # prints what to export
    python3 -m throwaway.slurm down DIR
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from throwaway import packages, processes, slurm_conf, users
from throwaway.packages import Unavailable
from throwaway.slurm_options import QOS, Options

__all__ = ["QOS", "Options", "ThrowawaySlurm", "Unavailable", "free_ports"]

ACCOUNT = "ml"
UNSET = {"gracetime": "0", "priority": "0", "preempt": "", "preemptmode": "cluster"}
"""What takes a setting of a QoS away again; all others take -1."""
ENDING = (signal.SIGTERM, signal.SIGKILL, signal.SIGINT, signal.SIGQUIT, signal.SIGABRT)
PORTS = range(
    10_000, 30_000
)  # below those that the kernel gives to outgoing connections, which would take ours meanwhile
_cursor = itertools.count()


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
        self._laid_out = False
        self._touched: dict[str, set[str]] = {}
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
        self._claim()
        try:
            self._lay_out()
            self._start_all()
        except BaseException:
            self.down()
            raise
        return self

    @classmethod
    def attach(cls, directory: Path) -> Self:
        """Take over a cluster that another process has brought up, to take it down.

        Args:
            directory: where it lives.

        Returns:
            A cluster that knows its running parts.

        Raises:
            RuntimeError: no cluster lives there.
        """
        directory = directory.resolve()
        try:
            known = json.loads((directory / "pids.json").read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RuntimeError(f"no throwaway Slurm lives in {directory}: it has no pids.json") from None
        slurm = cls(directory=directory)
        slurm._laid_out = True
        slurm.pids = {part: pid for part, (pid, when) in known.items() if processes.started(pid) == when}
        return slurm

    def _claim(self) -> None:
        """Take a directory of our own: :meth:`down` removes it with all that it holds."""
        # Not below TMPDIR, which may be a directory of root's own: the ordinary user has to enter.
        directory = self._directory or Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        self._directory = directory = directory.resolve()
        directory.mkdir(parents=True, exist_ok=True)
        if any(directory.iterdir()):
            raise RuntimeError(
                f"{directory} is not empty: a throwaway Slurm is put into a new directory, and removed with it"
            )
        self._laid_out = True
        directory.chmod(0o755)
        self._save_pids()

    def _save_pids(self) -> None:
        known = {part: (pid, processes.started(pid)) for part, pid in self.pids.items()}
        new = self.dir / "pids.new"
        new.write_text(json.dumps(known), encoding="utf-8")
        new.rename(self.dir / "pids.json")

    def _lay_out(self) -> None:
        if self.command("test", "-x", str(self.dir)).returncode:
            raise RuntimeError(f"the user {self.user} cannot enter {self.dir}: a directory above it is closed")
        self.ports = free_ports(self.options.nodes + 3)
        entry = users.ensure(self.user)
        for name in ("etc", "log", "run", "munge", "state", "dev", "mysql", "mysql-tmp", "work"):
            (self.dir / name).mkdir(exist_ok=True)
        for path, mode in (("munge", 0o711), ("work", 0o700), ("etc", 0o755)):
            (self.dir / path).chmod(mode)
        os.chown(self.work_dir, entry.pw_uid, entry.pw_gid)
        for name in ("mysql", "mysql-tmp"):
            shutil.chown(self.dir / name, "mysql", "mysql")
        key = self.dir / "munge" / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        slurm_conf.write(self.dir, self.options, self.ports)

    def _start_all(self) -> None:
        self.start("munged")
        if self.options.accounting:
            # slurmdbd needs stored procedures, and they need the system tables: an empty directory loses users in silence.
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
        """Give every QoS the settings it was made with, and take away what was set besides."""
        for name in {*self.options.qos, *self._touched}:
            made = dict(self.options.qos.get(name, {}))
            extra = self._touched.pop(name, set()) - {key.lower() for key in made}
            settings = {**{key: UNSET.get(key, "-1") for key in extra}, **made}
            if settings:
                self.modify_qos(name, **settings)
            self._touched.pop(name, None)

    def set_grace(self, name: str, seconds: int) -> None:
        """Change the GraceTime of a QoS.

        Args:
            name: the QoS.
            seconds: between the notice and the end; 0: none, the job gets KillWait.
        """
        self.modify_qos(name, GraceTime=str(seconds))

    def modify_qos(self, name: str, **settings: str) -> None:
        """Change a QoS.

        Args:
            name: the QoS.
            settings: sacctmgr's, such as `GraceTime="0"`.
        """
        self._touched.setdefault(name, set()).update(key.lower() for key in settings)
        self._sacctmgr("modify", "qos", name, "set", *(f"{key}={value}" for key, value in settings.items()))

    def _sacctmgr(self, *words: str) -> None:
        done = self.command("sacctmgr", "-i", *words, user="root")
        if done.returncode and "Nothing modified" not in done.stdout + done.stderr:
            raise RuntimeError(f"sacctmgr {' '.join(words)} exited {done.returncode}: {done.stdout}{done.stderr}")

    def down(self) -> None:
        """Stop everything this cluster has started, jobs as well, and remove its directory."""
        if self._directory is None or not self._laid_out:
            return
        for part in list(self.pids):
            self.kill(
                part
            )  # SIGKILL, for the database too: its files go with the directory, and a stopped part ends as well
        processes.kill_all_of(self._directory)
        shutil.rmtree(self._directory)
        self._directory, self._laid_out = None, False

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
        self._save_pids()
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

        Raises:
            RuntimeError: it goes on.
        """
        pid, child = self.pids.get(part), self._children.get(part)
        if pid is None:
            return
        for _ in range(30):  # a daemon that has only just started loses a signal
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
            if number not in ENDING:
                return
            if child is not None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(timeout=1)
            if processes.wait_end(pid, 1 if child is None else 0):
                break
        else:
            raise RuntimeError(f"{part} (pid {pid}) goes on 30 s after signal {number}\n{self.tail_logs()}")
        del self.pids[part]
        self._save_pids()

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
        """Cancel every job, wait until the queue is empty, and reset the QoS, so that tests can share one cluster."""
        jobs = self._queue()
        if jobs:
            # First the kill: a job that ignores SIGTERM would hold its nodes for KillWait and up to 30 s more.
            self.command("scancel", "--full", "--signal=KILL", *jobs, user="root")
            self.command("scancel", *jobs, user="root")
        self._wait("the queue to be empty", lambda: not self._queue(), 90)
        if self.options.accounting and self._touched:
            self.reset_qos()

    def _queue(self) -> list[str]:
        asked = self.command("squeue", "-h", "-o", "%A", user="root")
        if asked.returncode:  # silence is not an empty queue
            raise RuntimeError(f"squeue exited {asked.returncode}: {asked.stderr}\n{self.tail_logs()}")
        return asked.stdout.split()


def free_ports(count: int) -> list[int]:
    """Find ports of this host that nobody listens on.

    Every process begins elsewhere, and none gives a port twice, so that clusters may start side by side.

    Args:
        count: how many.

    Returns:
        The ports.

    Raises:
        RuntimeError: there are not so many.
    """
    first, ports = os.getpid() % 400 * 50, []
    for _ in PORTS:
        port = PORTS[(first + next(_cursor)) % len(PORTS)]
        if _free(port):
            ports.append(port)
        if len(ports) == count:
            return ports
    raise RuntimeError(f"this host has no {count} free ports from {PORTS.start} to {PORTS.stop}")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def _checked(argv: Sequence[str]) -> None:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{argv[0]} exited {done.returncode}: {(done.stdout + done.stderr)[-2000:]}")


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main(argv: Sequence[str] | None = None) -> None:
    """Bring a cluster up or take it down by hand.

    Args:
        argv: the arguments; None: the process's own.
    """
    parser = argparse.ArgumentParser(prog="python3 -m throwaway.slurm", description="A whole Slurm in one directory.")
    parser.add_argument("verb", choices=("up", "down"))
    parser.add_argument("directory", nargs="?", type=Path, help="where it lives (up: a new one below /tmp by default)")
    parser.add_argument("--dir", type=Path, dest="directory_option", metavar="DIR", help="the same, as an option")
    parser.add_argument("--no-accounting", action="store_true", help="partition priority instead of QoS")
    parser.add_argument("--grace", type=int, default=10, metavar="SECONDS", help="what a training gets to save (10)")
    args = parser.parse_args(argv)
    args.directory = args.directory or args.directory_option
    if args.verb == "down" and args.directory is None:
        parser.error("down needs the directory that up has named")
    try:
        _up(args) if args.verb == "up" else _down(args)
    except RuntimeError as error:
        sys.exit(str(error))


def _up(args: argparse.Namespace) -> None:
    options = Options(accounting=not args.no_accounting, grace_s=args.grace)
    slurm = ThrowawaySlurm(options, directory=args.directory).up()
    form = ["-p {}", "-p {} --qos={}"][options.accounting]
    print(f"Slurm is up, with nodes {', '.join(slurm.nodes)} of {slurm.options.gpus} (fake) GPUs each.")
    print(f"Jobs are submitted by the user {slurm.user}; nodes share {slurm.work_dir}. In a shell of that user:\n")
    print(f"    su - {slurm.user}\n    export SLURM_CONF={slurm.env()['SLURM_CONF']}\n    sinfo\n")
    print("A training on all GPUs, and an inference that makes it give way:\n")
    for partition, qos, gpus in (("train", "training", options.gpus), ("infer", "inference", 1)):
        nodes = f"-N {len(slurm.nodes)}" if partition == "train" else "-N 1"
        print(f"    sbatch {form.format(partition, qos)} {nodes} --gres=gpu:{gpus} --wrap='srun sleep 300'")
    print(f"    squeue\n\nIt goes on until root says: python3 -m throwaway.slurm down {slurm.dir}")


def _down(args: argparse.Namespace) -> None:
    slurm = ThrowawaySlurm.attach(args.directory)
    slurm.down()
    print(f"Slurm in {args.directory} is down, its jobs have ended, and the directory is gone.")


if __name__ == "__main__":
    main()
