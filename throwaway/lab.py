"""A bench for tests: a real Slurm, and workload tasks run through Airflow's own `dag.test()` as an ordinary user."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from throwaway import environment, users
from throwaway.slurm import ThrowawaySlurm


@dataclass
class Task:
    """A task that runs in a process of its own.

    Args:
        name: its DAG's id.
        process: the process.
        out: where its outcome will be.
        log_file: what it said.
        directory: its own directory below `work_dir`, the parent of that of its run.
    """

    name: str
    process: subprocess.Popen[bytes]
    out: Path
    log_file: Path
    directory: Path

    def wait(self, seconds: float) -> dict[str, Any]:
        """Wait for the task's end.

        Returns:
            What :mod:`throwaway.one_task` wrote: state, tries, result, record.

        Raises:
            RuntimeError: it did not end, or left no outcome; the message ends with its log.
        """
        try:
            self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise RuntimeError(f"{self.name} has not ended after {seconds:.0f} s\n{self.log()[-6000:]}") from None
        if not self.out.exists():
            raise RuntimeError(f"{self.name} left no outcome\n{self.log()[-6000:]}")
        return dict(json.loads(self.out.read_text(encoding="utf-8")))

    def calls(self) -> list[str]:
        """Return which callbacks were called, in turn."""
        place = self.out.with_name("calls")
        return place.read_text(encoding="utf-8").splitlines() if place.exists() else []

    def log(self) -> str:
        """Return what the task has logged."""
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @property
    def run_dir(self) -> Path | None:
        """The directory of the task of its DAG run; None before it was laid out."""
        return next(iter(self.directory.glob("*")), None)

    def steps(self) -> list[tuple[int, int, float]]:
        """Return the training's own step log: attempt, step, when."""
        if self.run_dir is None or not (self.run_dir / "steps.log").exists():
            return []
        lines = (self.run_dir / "steps.log").read_text(encoding="utf-8").splitlines()
        return [(int(attempt), int(step), float(when)) for attempt, step, when in (line.split() for line in lines)]


class Lab:
    """A Slurm, an environment and a database to copy.

    Args:
        slurm: the cluster, up.
    """

    def __init__(self, slurm: ThrowawaySlurm) -> None:
        self.slurm = slurm
        self.home = slurm.dir / "lab"
        self._lock = threading.Lock()
        self._count = 0
        self.environment: environment.Environment | None = None

    def up(self) -> Lab:
        """Make the environment, and a database that every task gets a copy of."""
        self.home.mkdir(exist_ok=True)
        shutil.chown(self.home, self.slurm.user)
        self.environment = environment.make(self.home / "stage")
        # Once: a copy made beside a task that starts would be read half written, as an empty program that ends well.
        self.put(Path(__file__).with_name("one_task.py"))
        template = self._home("template")
        code = "from airflow.utils import db; db.initdb()"
        done = subprocess.run(
            [self.environment.python, "-c", code],
            capture_output=True,
            text=True,
            check=False,
            **self._as_user(template),
        )
        if done.returncode:
            raise RuntimeError(f"Airflow's database could not be made: {done.stderr[-2000:]}")
        return self

    def _home(self, name: str) -> Path:
        home = self.home / name
        (home / "dags").mkdir(parents=True)
        for place in (home, home / "dags"):
            shutil.chown(place, self.slurm.user)
        return home

    def _as_user(self, home: Path, extra: Mapping[str, str] | None = None) -> dict[str, Any]:
        assert self.environment is not None, "not up"
        variables = {
            **self.environment.variables(),
            **self.slurm.env(),
            "AIRFLOW_HOME": str(home),
            "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
            "AIRFLOW__PROFSCHED__POLICY_FILE": str(self.home / "policy.yaml"),
            **(extra or {}),
        }
        return {"cwd": home, **users.run_as(self.slurm.user, variables)}

    def write_policy(self, text: str, name: str = "policy.yaml") -> Path:
        """Write a policy file that the user can read."""
        place = self.home / name
        place.write_text(text, encoding="utf-8")
        return place

    def put(self, source: Path) -> Path:
        """Copy a program where the user's jobs can read it."""
        return Path(shutil.copy(source, self.home / source.name))

    def task(
        self,
        operator: str,
        arguments: Mapping[str, Any],
        *,
        name: str = "",
        work_dir: Path | None = None,
        env: Mapping[str, str] | None = None,
        spec: Mapping[str, Any] | None = None,
    ) -> Task:
        """Start a task.

        Args:
            operator: a class of `airflow_profsched.operators`.
            arguments: its arguments; plain JSON.
            name: the DAG's id; empty: a new one.
            work_dir: the cluster's, where it is not the lab's own.
            env: further variables of Airflow's process.
            spec: further keys for :mod:`throwaway.one_task`.

        Returns:
            The running task.
        """
        with self._lock:
            self._count += 1
            number = self._count
        name = name or f"dag{number}"
        home = self._home(f"{number}-{name}")
        shutil.copy(self.home / "template" / "airflow.db", home / "airflow.db")
        shutil.chown(home / "airflow.db", self.slurm.user)
        out = home / "outcome.json"
        body = {"dag_id": name, "operator": operator, "arguments": dict(arguments), "out": str(out)}
        body |= {"calls": str(home / "calls"), **(spec or {})}
        (home / "spec.json").write_text(json.dumps(body), encoding="utf-8")
        runner = self.home / "one_task.py"
        assert self.environment is not None, "not up"
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(
                [self.environment.python, runner, home / "spec.json"],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, **self._as_user(home, env),
            )  # fmt: skip
        directory = (work_dir or self.slurm.work_dir) / name / "work" / "unmapped"
        return Task(name, process, out, home / "log", directory)

    def sbatch(self, *options: str, wrap: str, user: str | None = None) -> str:
        """Submit somebody's job by hand.

        Returns:
            Its id.
        """
        done = self.slurm.command("sbatch", "--parsable", "--output=/dev/null", *options, f"--wrap={wrap}", user=user)
        if done.returncode:
            raise RuntimeError(f"sbatch: {done.stderr}")
        return done.stdout.strip()

    def accounted(self, *jobs: str) -> dict[str, dict[str, Any]]:
        """Return what accounting says of jobs: state, exit code and times in epoch seconds."""
        fields = ("jobidraw", "state", "exitcode", "submit", "start", "end", "qos", "partition", "jobname")
        argv = ("sacct", "-D", "-X", "-n", "-P", "-j", ",".join(jobs), "-o", ",".join(fields))
        done = self.slurm.command("env", "SLURM_TIME_FORMAT=%s", *argv)
        rows: list[dict[str, Any]] = [
            dict(zip(fields, line.split("|"), strict=False)) for line in done.stdout.splitlines()
        ]
        for row in rows:
            row |= {name: float(row[name]) if row[name].isdigit() else None for name in ("submit", "start", "end")}
        return {row["jobidraw"]: row for row in rows}


def until(what: str, ready: Callable[[], Any], seconds: float, every: float = 0.3) -> Any:
    """Wait until something is so.

    Args:
        what: for the message.
        ready: says whether it is.
        seconds: how long at most.
        every: seconds between two looks.

    Returns:
        The first true answer.

    Raises:
        TimeoutError: it is not so yet.
    """
    end = time.monotonic() + seconds
    while not (answer := ready()):
        if time.monotonic() > end:
            raise TimeoutError(f"{what}: not within {seconds:.0f} s")
        time.sleep(every)
    return answer
