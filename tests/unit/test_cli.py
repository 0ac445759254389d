from __future__ import annotations

import json
import pathlib

import pytest

from airflow_profsched.cli import main

ROOT = pathlib.Path(__file__).parent.parent.parent
POLICY = """\
version: 1
clusters:
  dgx:
    kind: slurm
    work_dir: /shared/airflow
    profiles: {training: {qos: training, partition: train}, inference: {qos: inference, partition: infer}}
"""


@pytest.fixture
def policy(tmp_path):
    place = tmp_path / "policy.yaml"
    place.write_text(POLICY)
    return str(place)


def test_validate(policy, capsys):
    assert main(["policy", "validate", policy]) == 0
    assert "fine: profiles training, inference; clusters dgx" in capsys.readouterr().out


def test_validate_says_file_and_line(tmp_path, capsys):
    place = tmp_path / "policy.yaml"
    place.write_text("version: 1\nprofils: {}\n")
    assert main(["policy", "validate", str(place)]) == 1
    assert f"{place}:2: profils" in capsys.readouterr().err
    assert main(["policy", "validate", str(tmp_path / "nowhere")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_the_published_schema_is_the_models(capsys):
    assert main(["policy", "schema"]) == 0
    published = json.loads((ROOT / "docs" / "reference" / "policy.schema.json").read_text())
    assert json.loads(capsys.readouterr().out) == published


def test_explain_by_flags(policy, capsys):
    assert main(["explain", "--profile", "training", "--gpus", "8", "--nodes", "2", "--policy", policy]) == 0
    out = capsys.readouterr().out
    assert "profile training on cluster dgx" in out
    assert "#SBATCH --gres=gpu:8" in out
    assert f"QoS training: {policy}:6" in out


def test_explain_a_dag_file(policy, capsys):
    assert main(["explain", str(ROOT / "dags" / "profsched_together.py"), "--policy", policy, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {one["task"] for one in shown} == {f"profsched_together.{name}" for name in ("train", "neighbour", "score")}
    assert {one["placement"]["qos"] for one in shown} == {"training", "inference"}


def test_explain_a_mapped_task(policy, capsys):
    assert main(["explain", str(ROOT / "dags" / "profsched_inference.py"), "--task", "score", "--policy", policy]) == 0
    assert "profile inference" in capsys.readouterr().out


def test_explain_a_dag_without_a_name(policy, capsys, tmp_path):
    place = tmp_path / "nameless.py"
    place.write_text(
        "from airflow.sdk import DAG\nfrom airflow_profsched.operators import InferenceOperator\n"
        "with DAG('nameless', schedule=None):\n    InferenceOperator(task_id='t', command=['true'])\n"
    )
    assert main(["explain", str(place), "--policy", policy]) == 0
    assert "nameless.t: profile inference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--profile", "trainin", "--gpus", "1"], "did you mean 'training'"),
        (["--profile", "inference", "--gpus", "8"], "may have 4"),
        (["--profile", "training", "--gpus", "-1"], "greater than or equal to 0"),
        (["/no/such/dag.py"], "is no file of Python"),
    ],
)
def test_explain_says_what_is_wrong(policy, capsys, argv, words):
    assert main(["explain", *argv, "--policy", policy]) == 1
    assert words in capsys.readouterr().err


def test_a_wrong_call_is_status_2():
    with pytest.raises(SystemExit) as caught:
        main(["nosuch"])
    assert caught.value.code == 2


def test_doctor_without_a_cluster_says_how_to_begin(capsys, monkeypatch):
    monkeypatch.delenv("AIRFLOW__PROFSCHED__POLICY_FILE", raising=False)
    assert main(["doctor"]) == 1
    assert "--write-policy" in capsys.readouterr().out
