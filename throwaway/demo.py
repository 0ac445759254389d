"""`make demo`: the pipelines of `dags/` on a Slurm and an Airflow of their own, and what became of every job.

Exit status 0 says that a training was preempted, came back and finished: by the controller's and the accounting's own
records and by the training's own step log, not by our counters.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from throwaway import environment
from throwaway.airflow import ENDED, AirflowStack
from throwaway.environment import CHECKOUT
from throwaway.packages import Unavailable
from throwaway.slurm import ThrowawaySlurm

PIPELINES = ("profsched_training", "profsched_inference")
TOGETHER = "profsched_together"
SECONDS = 600
OUT = CHECKOUT / "demo" / "timeline.json"
COLUMNS = {
    "job": "job",
    "task": "task",
    "profile": "profile",
    "qos": "QoS",
    "attempt": "attempt",
    "waited_s": "waited (s)",
    "ran_s": "ran (s)",
    "ended_by": "ended by",
    "checkpoint_step": "checkpoint step",
    "steps_repeated": "steps repeated",
}

POLICY = """\
version: 1
clusters:
  throwaway:
    kind: slurm
    work_dir: {work_dir}
    profiles: {{training: {{qos: training, partition: train}}, inference: {{qos: inference, partition: infer}}}}
"""


def say(words: str) -> None:
    """Show progress."""
    print(f"[{time.strftime('%H:%M:%S')}] {words}", flush=True)


@dataclass
class Records:
    """What Slurm itself says: kept while it can be asked, since the controller forgets.

    Args:
        slurm: the cluster.
    """

    slurm: ThrowawaySlurm
    preempted: set[str] = field(default_factory=set)

    def look(self) -> None:
        """Note which jobs the controller has preempted."""
        done = self.slurm.command("squeue", "-h", "-t", "all", "-O", "JobID:|,PreemptTime:|", user="root")
        rows = (line.split("|") for line in done.stdout.splitlines() if line.count("|") > 1)
        self.preempted.update(row[0] for row in rows if row[1] not in ("", "N/A", "None"))

    def accounted(self) -> dict[str, dict[str, str]]:
        """Return accounting's newest row of every job."""
        names = ("job", "name", "qos", "state", "exit", "submit", "start", "end")
        fields = "jobidraw,jobname,qos,state,exitcode,submit,start,end"
        argv = (
            "env",
            "SLURM_TIME_FORMAT=%s",
            "sacct",
            "-D",
            "-X",
            "-n",
            "-P",
            "--allusers",
            "-S",
            "now-1day",
            "-o",
            fields,
        )
        rows = (line.split("|") for line in self.slurm.command(*argv, user="root").stdout.splitlines())
        return {row[0]: dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)}


@dataclass
class Demo:
    """One run of the demo.

    Args:
        slurm: the cluster.
        airflow: the Airflow.
    """

    slurm: ThrowawaySlurm
    airflow: AirflowStack
    seen: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Start with no records."""
        self.records = Records(self.slurm)
        self.runs: dict[str, str] = {}

    def run(self, *dag_ids: str) -> None:
        """Run DAGs side by side to their end, and show how their tasks stand.

        Raises:
            RuntimeError: one has not ended in time.
        """
        for dag_id in dag_ids:
            self.airflow.wait_for_dag(dag_id, 120)
            self.runs[dag_id] = self.airflow.trigger(dag_id)
            say(f"{dag_id}: started")
        until = time.monotonic() + SECONDS
        while True:
            self.records.look()
            states = {dag_id: self.airflow.run_state(dag_id, self.runs[dag_id]) for dag_id in dag_ids}
            for dag_id in dag_ids:
                self._show(dag_id)
            if all(state in ENDED for state in states.values()):
                return
            if time.monotonic() > until:
                raise RuntimeError(f"not ended after {SECONDS} s: {states}\n{self.airflow.tail_logs()}")
            time.sleep(1)

    def _show(self, dag_id: str) -> None:
        for task in self.airflow.task_instances(dag_id, self.runs[dag_id]):
            name = f"{dag_id}.{task['task_id']}" + (f"[{task['map_index']}]" if task["map_index"] >= 0 else "")
            record = self._record(dag_id, task) if task["state"] in ("deferred", *ENDED) else None
            job = f" (job {record['job_id']}, attempt {record['attempt']})" if record else ""
            words = f"{name}: {task['state'] or 'waiting'}{job}"
            if self.seen.get(name) != words and task["state"] not in ("queued", "scheduled"):
                self.seen[name] = words
                say(words)

    def _record(self, dag_id: str, task: dict[str, Any]) -> dict[str, Any] | None:
        found = self.airflow.xcom(dag_id, self.runs[dag_id], task["task_id"], "profsched", task["map_index"])
        return found if isinstance(found, dict) else None

    # ------------------------------------------------------------------------------------------------ timeline

    def timeline(self) -> Iterator[dict[str, Any]]:
        """Yield one row per attempt; times, QoS and states are accounting's, steps the training's own."""
        rows = self.records.accounted()
        for dag_id, run_id in self.runs.items():
            for task in self.airflow.task_instances(dag_id, run_id):
                record = self._record(dag_id, task)
                for attempt in record["attempts"] if record else ():
                    steps = _steps(record or {})
                    yield self._row(
                        f"{dag_id}.{task['task_id']}", record or {}, attempt, rows[attempt["job_id"]], steps
                    )

    def _row(
        self,
        task: str,
        record: dict[str, Any],
        attempt: dict[str, Any],
        row: dict[str, str],
        steps: list[tuple[int, int]],
    ) -> dict[str, Any]:
        number = attempt["attempt"]
        mine = {step for whose, step in steps if whose == number}
        before = {step for whose, step in steps if whose < number}
        return {
            "job": row["job"],
            "task": task,
            "profile": record["profile"],
            "qos": row["qos"],
            "attempt": number,
            "waited_s": _between(row["submit"], row["start"]),
            "ran_s": _between(row["start"], row["end"]),
            "ended_by": attempt["ended_by"],
            "checkpoint_step": attempt["step"],
            "steps_repeated": len(mine & before) if steps else None,
            "slurm_state": row["state"],
            "preempted_by_slurm": row["job"] in self.records.preempted,
            "first_step": min(mine, default=None),
            "last_step": max(mine, default=None),
        }

    def proofs(self, rows: list[dict[str, Any]]) -> Iterator[str]:
        """Yield what is missing of the proof that a training was preempted, came back and finished."""
        for dag_id, run_id in self.runs.items():
            state = self.airflow.run_state(dag_id, run_id)
            if state != "success":
                yield f"DAG run {dag_id} ended as {state}"
        trainings: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["profile"] == "training":
                trainings.setdefault(row["task"], []).append(row)
        back = [task for task, attempts in trainings.items() if _came_back(attempts)]
        if not back:
            yield "no training was preempted by Slurm, came back behind its last step, and finished"
        yield from (f"{task}: {fault}" for task, attempts in trainings.items() for fault in _faults(attempts))


def _steps(record: dict[str, Any]) -> list[tuple[int, int]]:
    place = Path(record.get("checkpoint_dir") or "/nonexistent", "steps.log")
    if not place.exists():
        return []
    rows = (line.split() for line in place.read_text(encoding="utf-8").splitlines())
    return [(int(row[0]), int(row[1])) for row in rows]


def _between(start: str, end: str) -> float | None:
    return float(end) - float(start) if start.isdigit() and end.isdigit() else None


def _came_back(attempts: list[dict[str, Any]]) -> bool:
    """The controller preempted an attempt, and the last one began behind what was done and ended well."""
    first, last = attempts[0], attempts[-1]
    resumed = last["first_step"] is not None and first["last_step"] is not None and last["first_step"] > 1
    return any(row["preempted_by_slurm"] for row in attempts[:-1]) and resumed and last["slurm_state"] == "COMPLETED"


def _faults(attempts: list[dict[str, Any]]) -> Iterator[str]:
    for before, after in itertools.pairwise(attempts):
        last, first = before["last_step"], after["first_step"]
        if last is not None and first is not None and first > last + 1:
            yield f"steps {last + 1} to {first - 1} are missing"
    if attempts[-1]["slurm_state"] != "COMPLETED":
        yield f"its last job ended as {attempts[-1]['slurm_state']}"


def show(rows: list[dict[str, Any]]) -> None:
    """Print the timeline as a table."""
    lines = [list(COLUMNS.values())]
    lines += [["" if row[name] is None else str(row[name]) for name in COLUMNS] for row in rows]
    widths = [max(len(line[index]) for line in lines) for index in range(len(COLUMNS))]
    print()
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print()


def set_up(slurm: ThrowawaySlurm) -> AirflowStack:
    """Make an Airflow for a cluster, with a policy of six lines and the DAGs of this checkout; it is not started.

    Args:
        slurm: the cluster, up.

    Returns:
        The Airflow.
    """
    say("making the environment of the ordinary user")
    made = environment.make(slurm.dir / "stage")
    policy = slurm.dir / "policy.yaml"
    policy.write_text(POLICY.format(work_dir=slurm.work_dir), encoding="utf-8")
    env = {**slurm.env(), "AIRFLOW__PROFSCHED__POLICY_FILE": str(policy)}
    airflow = AirflowStack(slurm.dir / "airflow", made, slurm.user, env)
    airflow.prepare()
    shutil.copytree(CHECKOUT / "dags", airflow.dags, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    for path in airflow.dags.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return airflow


def main() -> int:
    """Run the demo.

    Returns:
        0 if a training was preempted, came back and finished; else 1.
    """
    say("starting a Slurm of two nodes with 4 (fake) GPUs each, accounting and QoS")
    slurm = ThrowawaySlurm()
    try:
        slurm.up()
    except Unavailable as error:
        say(f"the demo needs a Slurm, and there can be none here: {error}")
        return 1
    airflow = None
    try:
        airflow = set_up(slurm)
        say("starting Airflow's four processes")
        airflow.up()
        return _play(Demo(slurm, airflow))
    finally:
        if airflow is not None:
            airflow.down()
        slurm.down()


def _play(demo: Demo) -> int:
    demo.run(*PIPELINES)
    demo.run(TOGETHER)
    rows = list(demo.timeline())
    show(rows)
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    missing = list(demo.proofs(rows))
    for fault in missing:
        say(f"not shown: {fault}")
    if not missing:
        say("a training was preempted, came back at its checkpoint, and finished (timeline in demo/timeline.json)")
    if os.environ.get("KEEP"):
        input(f"\nThe UI is at {demo.airflow.address} (no password). Enter ends everything. ")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
