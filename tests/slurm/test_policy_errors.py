"""A wrong policy is an error of the task that asks, in words, and of no other DAG."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slurm

GOOD = """\
version: 1
clusters:
  here: {{kind: slurm, work_dir: {work_dir}, profiles: {{training: {{qos: training, partition: s1}}}}}}
"""


def ask(lab, name, policy, **arguments):
    place = lab.write_policy(policy, f"{name}.yaml") if policy is not None else lab.home / "absent.yaml"
    body = {
        "command": ["true"],
        "profile": "training",
        "resources": {"gpus": 1},
        "deferrable": True,
        "retries": 1,
        "retry_delay": 0,
    }
    env = {"AIRFLOW__PROFSCHED__POLICY_FILE": str(place)}
    return lab.task("WorkloadOperator", body | arguments, name=name, env=env)


def test_each_is_a_clear_error_at_the_task(lab):
    """Side by side: nothing here reaches the cluster."""
    unwritable = lab.home / "unwritable"
    unwritable.mkdir(mode=0o755, exist_ok=True)
    work_dir = lab.slurm.work_dir
    cases = {
        "unknown": (GOOD.format(work_dir=work_dir), {"profile": "trainin"}, "did you mean 'training'", 1),
        "broken": (
            "version: 1\nclusters: {here: {kind: slurm, polling: 3}}\n",
            {},
            "broken.yaml:2: clusters.here.polling",
            1,
        ),
        "missing": (None, {}, "cannot be read (No such file or directory)", 1),
        "unnamed": (GOOD.format(work_dir='""'), {}, "has no work_dir", 2),
        "nowhere": (
            GOOD.format(work_dir="/no/such/place"),
            {},
            "work_dir /no/such/place of cluster here is not there",
            2,
        ),
        "unwritable": (GOOD.format(work_dir=unwritable), {}, "cannot be written by uid", 2),
        "word": (GOOD.format(work_dir=work_dir), {"command": "train.py"}, "command must be a list of words", 1),
    }
    tasks = {name: ask(lab, name, policy, **arguments) for name, (policy, arguments, _, _) in cases.items()}
    for name, (_, _, words, tries) in cases.items():
        result = tasks[name].wait(120)
        log = tasks[name].log()
        assert result["state"] == "failed", log[-2000:]
        assert words in log, log[-2000:]
        assert result["try_number"] == tries, (
            f"{name}: a wrong policy spends no retry, a directory that may come back does"
        )
