"""`profsched` against the real Slurm, and the verbs where their answer depends on it."""

from __future__ import annotations

import json
import subprocess

import pytest

from throwaway import users
from throwaway.lab import until

pytestmark = pytest.mark.slurm

POLICY = """\
version: 1
clusters:
  here: {{kind: slurm, work_dir: {work_dir}, profiles: {{training: {{qos: training, partition: s1}}}}}}
"""


@pytest.fixture(scope="module")
def profsched(lab):
    lab.write_policy(POLICY.format(work_dir=lab.slurm.work_dir), "here.yaml")
    variables = {**lab.environment.variables(), **lab.slurm.env(), "AIRFLOW_HOME": str(lab.home / "template")}
    variables["AIRFLOW__PROFSCHED__POLICY_FILE"] = str(lab.home / "here.yaml")

    def run(*argv):
        options = users.run_as(lab.slurm.user, variables)
        return subprocess.run(
            ["profsched", *argv], capture_output=True, text=True, check=False, cwd=lab.home / "template", **options
        )

    return run


def test_doctor_finds_what_is_wrong(lab, profsched):
    done = profsched("doctor")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "nothing is missing" in done.stdout
    lab.write_policy(POLICY.format(work_dir="/no/such/place").replace("qos: training", "qos: trainin"), "wrong.yaml")
    wrong = profsched("doctor", "--policy", str(lab.home / "wrong.yaml"))
    assert wrong.returncode == 1
    assert "did you mean 'training'" in wrong.stdout
    assert "is not there" in wrong.stdout


def test_doctor_drafts_a_policy_that_validates(lab, profsched):
    place = lab.home / "template" / "draft.yaml"
    done = profsched("doctor", "--write-policy", str(place), "--work-dir", str(lab.slurm.work_dir))
    assert done.returncode == 0, done.stderr
    assert len(place.read_text().splitlines()) == 6
    assert profsched("policy", "validate", str(place)).returncode == 0
    assert profsched("doctor", "--policy", str(place)).returncode == 0
    again = profsched("doctor", "--write-policy", str(place))
    assert (again.returncode, "is left untouched" in again.stderr) == (1, True)


def test_jobs_and_orphans(lab, profsched):
    comment = "--comment=profsched:1:1:nonce:1:training"
    job = lab.sbatch("--partition=s1", "--qos=training", "--job-name=lonely", comment, wrap="sleep 300")
    try:
        shown = json.loads(profsched("jobs", "--json").stdout)
        assert [(one["job_id"], one["profile"], one["attempt"]) for one in shown if one["name"] == "lonely"] == [
            (job, "training", 1)
        ]
        assert job not in profsched("orphans").stdout, "too young"
        until("it to be old enough", lambda: job in profsched("orphans", "--after", "1s").stdout, 30)
        refused = profsched("orphans", "--after", "1s", "--cancel")
        assert (refused.returncode, "nothing is cancelled" in refused.stderr) == (1, True)
        assert f"cancelled job {job}" in profsched("orphans", "--after", "1s", "--cancel", "--force").stdout
        until("its end", lambda: lab.accounted(job)[job]["state"].startswith("CANCELLED"), 60)
    finally:
        lab.slurm.command("scancel", job)
