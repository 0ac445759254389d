from __future__ import annotations

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_profsched.cluster.scheduler import Order
from airflow_profsched.core.errors import SubmitError
from airflow_profsched.core.jobs import JobKey, TaskKey
from airflow_profsched.core.placement import TaskRequest, resolve
from airflow_profsched.core.policyfile import load_policy
from airflow_profsched.core.profiles import Resources
from airflow_profsched.slurm.script import options, render

POLICY = """\
version: 1
clusters:
  dgx:
    kind: slurm
    work_dir: /shared
    gpu_form: {form}
    gpu_types: {{h100: h100_80gb}}
    setup: ["module load cuda/12.9", "export A='b c'"]
    login_shell: {login}
    profiles: {{training: {{qos: training, partition: train, constraint: "a100&ib"}}}}
    projects: {{default: {{account: ml}}}}
    overrides: [mail_type]
"""


def placed(form="gres", login="false", **resources):
    policy = load_policy(POLICY.format(form=form, login=login), "p.yaml")
    asked = {"nodes": 2, "gpus": 8, "gpu_type": "h100", "cpus": 64, "memory": "512Gi", "walltime": "24h"} | resources
    return resolve(policy, TaskRequest(Resources(**asked), "training", overrides={"slurm": {"mail_type": "FAIL"}}))


def order(attempt_dir="/shared/dag/task/unmapped/abc/attempt-1", **more):
    return Order(JobKey(TaskKey("dag", "run", "task"), 1), "nonce", attempt_dir, **more)


def test_every_directive():
    given_options = dict(options(placed(), order(excluded=("n3", "n4"))))
    assert given_options == {
        "job-name": TaskKey("dag", "run", "task").name,
        "comment": "profsched:1:1:nonce:1:training",
        "output": "/shared/dag/task/unmapped/abc/attempt-1/job.log",
        "open-mode": "append",
        "chdir": "/shared/dag/task/unmapped/abc/attempt-1",
        "no-requeue": "",
        "export": "ALL",
        "partition": "train",
        "qos": "training",
        "account": "ml",
        "constraint": "a100&ib",
        "nodes": "2",
        "ntasks-per-node": "1",
        "cpus-per-task": "64",
        "mem": "524288M",
        "gres": "gpu:h100_80gb:8",
        "time": "1-00:00:00",
        "signal": "TERM@120",
        "exclude": "n3,n4",
        "mail-type": "FAIL",
    }


@pytest.mark.parametrize(
    ("form", "option"),
    [
        ("gres", ("gres", "gpu:h100_80gb:8")),
        ("gpus", ("gpus", "h100_80gb:16")),
        ("gpus-per-node", ("gpus-per-node", "h100_80gb:8")),
    ],
)
def test_gpus_are_asked_for_in_the_clusters_one_form(form, option):
    asked = [pair for pair in options(placed(form), order()) if pair[0] in ("gres", "gpus", "gpus-per-node")]
    assert asked == [option]


def test_the_script_ends_by_becoming_the_step():
    lines = render(placed(), order()).splitlines()
    assert lines[0] == "#!/bin/bash"
    assert lines[-3:-1] == ["module load cuda/12.9", "export A='b c'"]
    words = shlex.split(lines[-1])
    assert words[:4] == ["exec", "srun", "--export=ALL", "--kill-on-bad-exit=1"]
    assert "--cpus-per-task=64" in words
    assert words[-2:] == ["/bin/sh", "/shared/dag/task/unmapped/abc/attempt-1/step.sh"]


def test_a_login_shell_only_where_the_policy_says_so():
    assert render(placed(login="true"), order()).startswith("#!/bin/bash -l\n")


def test_paths_with_blanks_and_percent_signs_arrive():
    text = render(placed(), order("/shared/a b%j/attempt-1"))
    assert '#SBATCH --output="/shared/a b%%j/attempt-1/job.log"' in text
    assert '#SBATCH --chdir="/shared/a b%j/attempt-1"' in text


@given(st.text(min_size=1, max_size=40))
def test_no_path_becomes_a_directive_or_a_shell_word(name):
    try:
        text = render(placed(), order(f"/shared/{name}/attempt-1"))
    except SubmitError:
        return
    directives = [line for line in text.split("\n") if line.startswith("#SBATCH")]
    assert len(directives) == 19
    assert shlex.split(text.rstrip("\n").split("\n")[-1])[-1] == f"/shared/{name}/attempt-1/step.sh"
