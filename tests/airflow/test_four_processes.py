"""Airflow's four processes, as an ordinary user, on a real Slurm: the demo, and what the triggerer has to do."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from throwaway.airflow import ENDED
from throwaway.demo import OUT, set_up
from throwaway.environment import CHECKOUT
from throwaway.lab import until
from throwaway.packages import Unavailable
from throwaway.slurm import ThrowawaySlurm

pytestmark = [pytest.mark.airflow, pytest.mark.timeout(900)]

DAG = """
from airflow.sdk import DAG
from airflow_profsched import Resources
from airflow_profsched.operators import InferenceOperator

for name, seconds in (("short", 20), ("long", 600)):
    with DAG(name, schedule=None):
        InferenceOperator(
            task_id="work", command=["sleep", str(seconds)], resources=Resources(gpus=1, walltime="30m"), deferrable=True, retries=0
        )
"""


def test_the_demo_shows_a_training_that_comes_back():
    """`make demo` as it is: its exit status rests on Slurm's own records and the training's own step log."""
    OUT.unlink(missing_ok=True)
    env = {name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")}
    done = subprocess.run(
        [sys.executable, "-m", "throwaway.demo"],
        capture_output=True,
        text=True,
        check=False,
        cwd=CHECKOUT,
        env=env,
        timeout=800,
    )
    if "there can be none here" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    rows = json.loads(OUT.read_text(encoding="utf-8"))
    preempted = [row for row in rows if row["preempted_by_slurm"]]
    assert preempted
    for row in preempted:
        after = [other for other in rows if other["task"] == row["task"] and other["attempt"] == row["attempt"] + 1]
        assert [other["first_step"] for other in after] == [row["last_step"] + 1]


@pytest.fixture(scope="module")
def stack():
    slurm = ThrowawaySlurm()
    try:
        slurm.up()
    except Unavailable as error:
        pytest.skip(f"no Slurm here: {error}")
    airflow = None
    try:
        airflow = set_up(slurm)
        for path in airflow.dags.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        (airflow.dags / "two.py").write_text(DAG)
        airflow.up()
        yield slurm, airflow
    finally:
        if airflow is not None:
            airflow.down()
        slurm.down()


def begin(airflow, slurm, dag_id):
    """Start a run and wait until its job runs and its task is deferred."""
    airflow.wait_for_dag(dag_id)
    run_id = airflow.trigger(dag_id)
    until("the task to be deferred", lambda: airflow.task(dag_id, run_id, "work")["state"] == "deferred", 60)
    record = until("its record", lambda: airflow.xcom(dag_id, run_id, "work", "profsched"), 30)
    until("its job", lambda: state(slurm, record["job_id"]) == "RUNNING", 60)
    # Between the deferral and the trigger's start Airflow calls nobody when a user ends the task (docs/how-to/orphans.md).
    until("its trigger", lambda: f"job {record['job_id']} on" in airflow.log(dag_id, run_id, "work"), 60)
    return run_id, record["job_id"]


def state(slurm, job):
    return slurm.command("squeue", "-h", "-t", "all", "-j", job, "-o", "%T", user="root").stdout.strip()


def live(slurm):
    return slurm.command("squeue", "-h", "-o", "%i", user="root").stdout.split()


def patch(airflow, dag_id, run_id, new_state):
    from urllib.parse import quote

    airflow.api(
        "PATCH", f"/dags/{dag_id}/dagRuns/{quote(run_id, safe='')}/taskInstances/work", {"new_state": new_state}
    )


@pytest.mark.parametrize("new_state", ["failed", "success"])
def test_a_user_who_ends_the_deferred_task_ends_its_job(stack, new_state):
    slurm, airflow = stack
    run_id, job = begin(airflow, slurm, "long")
    patch(airflow, "long", run_id, new_state)
    until("the job's end", lambda: state(slurm, job).startswith("CANCELLED"), 60)
    assert airflow.task("long", run_id, "work")["state"] == new_state
    assert job not in live(slurm)


def test_a_cleared_task_starts_one_fresh_job(stack):
    slurm, airflow = stack
    run_id, job = begin(airflow, slurm, "long")
    body = {"dry_run": False, "task_ids": ["work"], "dag_run_id": run_id, "only_failed": False, "reset_dag_runs": True}
    airflow.api("POST", "/dags/long/clearTaskInstances", body)
    until("the old job's end", lambda: job not in live(slurm), 90)

    def fresh():
        now = [other for other in live(slurm) if other != job]
        return now if airflow.task("long", run_id, "work")["state"] == "deferred" and now else None

    jobs = until("a fresh job", fresh, 120)
    assert len(jobs) == 1
    until("its trigger", lambda: f"job {jobs[0]} on" in airflow.log("long", run_id, "work", 2), 60)
    patch(airflow, "long", run_id, "failed")
    until("its end", lambda: not live(slurm), 60)
    assert airflow.run_state("long", run_id) in ENDED


def test_a_killed_triggerer_costs_nothing_and_the_job_is_untouched(stack):
    slurm, airflow = stack
    run_id, job = begin(airflow, slurm, "short")
    airflow.kill("triggerer", signal.SIGKILL)
    assert state(slurm, job) == "RUNNING"
    airflow.start("triggerer")
    assert airflow.wait("short", run_id, 180) == "success"
    record = airflow.xcom("short", run_id, "work", "profsched")
    assert [attempt["job_id"] for attempt in record["attempts"]] == [job]
    assert airflow.task("short", run_id, "work")["try_number"] == 1
