"""A node for the tests: lays an attempt out and starts jobside as srun would, with real processes and real signals."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

from airflow_profsched.cluster import workdir
from airflow_profsched.core.jobs import JobKey, TaskKey

KEY = JobKey(TaskKey("dag", "run", "task"), 1)


class Node:
    """A node: lays an attempt out and starts jobside as srun would."""

    def __init__(self, tmp_path, code, ranks=1, env=None, **spec):
        self.paths = workdir.AttemptPaths(str(tmp_path), KEY)
        body = {
            "version": 1, "task": KEY.task.name, "key": KEY.name, "attempt": 1, "nonce": "n", "cluster": "c", "profile": "training",
            "preemptible": True, "argv": [sys.executable, "-c", code], "cwd": None, "work_dir": str(tmp_path),
            "task_dir": self.paths.task_dir, "attempt_dir": self.paths.attempt_dir, "mailbox_dir": self.paths.mailbox_dir,
            "checkpoint_dir": f"{self.paths.task_dir}/checkpoints", "layout": "", "grace_s": 3.0, "stop_signal": "TERM",
            "checkpoint_interval_s": 12.5, "ranks": ranks, "nodes": ranks, "tasks_per_node": 1, "gpus_per_node": 4,
            "walltime_s": 3600, "heartbeat_s": 60, "owner_poll_s": 0.2, "fence_s": 0, "traceparent": "",
        }  # fmt: skip
        workdir.prepare_attempt(self.paths, body | spec, env or {}, "#!")

    def start(self, rank=0, command=None, **variables):
        """Start one rank; a variable that is None is taken out of its environment."""
        slurm = {
            "SLURM_PROCID": str(rank),
            "SLURM_NODEID": str(rank),
            "SLURM_JOB_ID": "7",
            "SLURM_RESTART_COUNT": "0",
            "SLURM_JOB_END_TIME": None,
        }
        # PROFSCHED_REQUIRE and its like belong to the suite: a job would have none of them but by its contract.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROFSCHED_")}
        env = {name: value for name, value in {**inherited, **slurm, **variables}.items() if value is not None}
        return subprocess.Popen(
            command or ["/bin/sh", f"{self.paths.attempt_dir}/step.sh"], env=env, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True, cwd="/",
        )  # fmt: skip

    def start_by(self, python, rank=0, **variables):
        """Start one rank by an interpreter of our choice, as step.sh does by the node's own."""
        place = self.paths.attempt_dir
        return self.start(rank, [python, "-I", f"{place}/jobside.pyz", "run", f"{place}/spec.json"], **variables)

    def marker(self, rank=0):
        return json.loads((pathlib.Path(self.paths.attempt_dir) / f"rank-{rank}.end").read_text())

    def attempt_file(self, name):
        return pathlib.Path(self.paths.attempt_dir) / name

    def file(self, name):
        return pathlib.Path(self.paths.task_dir) / name

    def note(self, event):
        return pathlib.Path(self.paths.mailbox_dir) / f"{KEY.name}.{event}"

    def wait_for(self, name, seconds=10):
        until(self.file(name).exists, name, seconds)


def until(holds, what, seconds=10):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, f"{what} never came"
        time.sleep(0.02)


def alive(pid):
    """Whether a process lives; one that is dead and not yet collected does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def one(process, number):
    """To jobside alone, as some clusters send it."""
    os.kill(process.pid, number)


def group(process, number):
    """Everything the step holds, as Slurm does it: jobside, the program, and what it has started."""
    below = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=False
    )
    one(process, number)
    for pid in map(int, below.stdout.split()):
        with contextlib.suppress(ProcessLookupError):  # jobside has reaped it since
            os.kill(pid, number)


def once(send, process):
    send(process, signal.SIGTERM)


def repeatedly(send, process):
    for _ in range(3):
        send(process, signal.SIGTERM)
        time.sleep(0.05)
