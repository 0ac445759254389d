"""Measures, prints a table, and writes benchmarks/results.json."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from airflow_profsched.cluster.exchange import Reply, Request, run
from airflow_profsched.cluster.scheduler import Order
from airflow_profsched.core.jobs import JobKey, TaskKey
from airflow_profsched.core.placement import TaskRequest, resolve
from airflow_profsched.core.policyfile import load_policy
from airflow_profsched.core.profiles import Resources
from airflow_profsched.slurm.scheduler import SlurmScheduler

OUT = Path(__file__).with_name("results.json")
POLICY = """\
version: 1
clusters:
  dgx: {kind: slurm, work_dir: /shared, profiles: {training: {qos: training, partition: train}}}
"""
BARE = """
from airflow.sdk import DAG, BaseOperator
class Task(BaseOperator):
    def __init__(self, *, command, **kwargs):
        super().__init__(**kwargs)
        self.command = command
with DAG("d", schedule=None):
    Task(task_id="t", command=["true"])
"""
OURS = """
from airflow.sdk import DAG
from airflow_profsched import Resources
from airflow_profsched.operators import TrainingOperator
with DAG("d", schedule=None):
    TrainingOperator(task_id="t", command=["true"], resources=Resources(gpus=8))
"""
PARSE = "import airflow.sdk, airflow.providers.common.compat.sdk, time\nbegan = time.perf_counter()\n{}\nprint(time.perf_counter() - began)"


def row(name: str, ours: float, unit: str, n: int, **anchor: Any) -> dict[str, Any]:
    """Make a row of the results; `anchor` and `anchor_name` are null where there is none."""
    beside = anchor.get("anchor")
    ratio = None if not beside else round(ours / beside, 3)
    rounded = None if beside is None else round(beside, 3)
    return {
        "name": name, "ours": round(ours, 3), "anchor": rounded, "anchor_name": anchor.get("anchor_name"), "ratio": ratio,
        "unit": unit, "n": n,
    }  # fmt: skip


def parse_ms(code: str) -> float:
    """Return how long a DAG file takes in a process that has loaded Airflow's SDK, in ms."""
    done = subprocess.run([sys.executable, "-c", PARSE.format(code)], capture_output=True, text=True, check=True)
    return 1000 * float(done.stdout.splitlines()[-1])


def dag_parse(n: int = 15) -> dict[str, Any]:
    """Measure what our operators add to the parse of a DAG file; both are run in turn, so that a busy machine hurts both."""
    pairs = [(parse_ms(OURS), parse_ms(BARE)) for _ in range(n)]
    ours, bare = (statistics.median(values) for values in zip(*pairs, strict=True))
    return row("dag_parse", ours, "ms", n, anchor=bare, anchor_name="a bare operator of airflow.sdk")


def submission(n: int = 300) -> list[dict[str, Any]]:
    """Measure our own code in a first submission, and count its requests; the sender answers at once."""
    placed = resolve(load_policy(POLICY, "policy.yaml"), TaskRequest(Resources(gpus=8), "training"))
    scheduler, requests, times = SlurmScheduler(placed), [0], []

    def send(_: Request) -> Reply:
        requests[0] += 1
        return Reply(0, "12\n")

    for number in range(n):
        order = Order(JobKey(TaskKey("dag", str(number), "task"), 1), "nonce", "/shared/dag/task/attempt-1")
        times.append(_timed(lambda order=order: run(scheduler.submit(order), send)))  # type: ignore[misc]
    return [
        row("submit_overhead", 1000 * statistics.median(times), "ms", n),
        row("submit_requests", requests[0] / n, "requests per first submission", n),
    ]


def _timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def main() -> None:
    """Measure everything."""
    rows = [dag_parse(), *submission()]
    for one in rows:
        beside = "" if one["anchor"] is None else f" beside {one['anchor']} ({one['anchor_name']})"
        print(f"{one['name']}: {one['ours']} {one['unit']}{beside}, n={one['n']}")
    OUT.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
