"""What Airflow sees of the package: provider info, parsing, serialisation, connection."""

from __future__ import annotations

import importlib.util
import json
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent.parent
HEAVY = (
    "kubernetes",
    "kubernetes_asyncio",
    "httpx",
    "asyncssh",
    "paramiko",
    "fastapi",
    "sqlalchemy",
    "yaml",
    "asyncio",
)


def loaded(code):
    code += "\nimport sys, json; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_dag_file_pays_for_no_heavy_import():
    bare = loaded(
        "from airflow.providers.common.compat.sdk import BaseOperator, conf, BaseOperatorLink, AirflowException, XCom"
    )
    ours = loaded("import airflow_profsched.operators") - bare
    assert not ours & set(HEAVY)
    assert {name for name in ours if name.startswith("airflow_profsched.")} <= {
        "airflow_profsched.core", "airflow_profsched.core.profiles", "airflow_profsched.core.units",
        "airflow_profsched.links", "airflow_profsched.operators", "airflow_profsched.operators.workload",
    }  # fmt: skip


def test_the_provider_info_fits_airflows_schema():
    import airflow
    import jsonschema

    from airflow_profsched.provider_info import get_provider_info

    schema = json.loads((pathlib.Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(get_provider_info(), schema)


def test_airflow_finds_provider_connection_and_link():
    from airflow.providers_manager import ProvidersManager

    manager = ProvidersManager()
    assert "airflow-profsched" in manager.providers
    assert manager.hooks["slurm"].hook_name == "Slurm"
    assert "airflow_profsched.links.JobLink" in manager.extra_links_class_names


def test_the_form_of_the_connection_is_a_json_schema_per_field():
    """Airflow does not check conn-fields when it runs, so this does."""
    import jsonschema

    from airflow_profsched.provider_info import get_provider_info

    (connection,) = get_provider_info()["connection-types"]
    for field in connection["conn-fields"].values():
        jsonschema.Draft202012Validator.check_schema(field["schema"])
        assert field["label"]
        assert field["description"]


@pytest.mark.parametrize(
    "uri",
    [
        "slurm://?cluster=west&job_url=https%3A%2F%2Fg.example.org%2F%7Bjob_id%7D",
        '{"conn_type": "slurm", "extra": {"cluster": "west"}}',
    ],
)
def test_a_connection_as_uri_or_json(monkeypatch, uri):
    monkeypatch.setenv("AIRFLOW_CONN_SLURM_DEFAULT", uri)
    from airflow_profsched.hooks.slurm import SlurmHook

    assert SlurmHook().extra["cluster"] == "west"
    assert SlurmHook().get_conn().env["SLURM_CLUSTERS"] == "west"


def test_without_a_connection_it_is_this_hosts_own_slurm(monkeypatch):
    monkeypatch.delenv("AIRFLOW_CONN_SLURM_DEFAULT", raising=False)
    from airflow.utils import db

    from airflow_profsched.hooks.slurm import SlurmHook

    db.initdb()
    assert SlurmHook().extra == {}
    ok, words = SlurmHook().test_connection()
    assert isinstance(ok, bool)
    assert words


def load(path):
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.dag


@pytest.mark.parametrize("path", sorted((ROOT / "dags").glob("*.py")), ids=lambda path: path.name)
def test_the_example_dags_survive_serialisation(path):
    """A mapped task that named `resources` in `partial` could not be read back: the whole file would vanish."""
    from airflow.serialization.serialized_objects import DagSerialization

    dag = load(path)
    back = DagSerialization.from_dict(json.loads(json.dumps(DagSerialization.to_dict(dag))))
    assert set(back.task_ids) == set(dag.task_ids)


def operator(**arguments):
    from airflow.sdk import DAG

    from airflow_profsched.operators import TrainingOperator

    with DAG("d", schedule=None):
        return TrainingOperator(task_id="t", command=["true"], **arguments)


def test_an_unknown_profile_or_cluster_is_no_error_of_the_parse():
    assert operator(profile="nosuch", cluster="nosuch").profile == "nosuch"


def test_resources_may_be_a_mapping_with_templates():
    from airflow_profsched.core.profiles import Resources
    from airflow_profsched.operators.plan import model

    task = operator(resources={"nodes": "{{ params.nodes }}", "gpus": 8})
    task.render_template_fields({"params": {"nodes": "2"}})
    assert model(Resources, task.needs, "t") == Resources(nodes=2, gpus=8)


def test_environment_values_are_no_template_field():
    """Airflow keeps rendered fields in its database and shows them."""
    assert "env" not in operator(env={"TOKEN": "{{ var.value.token }}"}).template_fields


def test_wrong_arguments_are_policy_errors_of_the_task():
    from airflow_profsched.core.errors import PolicyError
    from airflow_profsched.core.profiles import Resources
    from airflow_profsched.operators.plan import model

    with pytest.raises(PolicyError, match="task t: resources cannot be read"):
        model(Resources, {"gpu": 8}, "t")


@pytest.mark.parametrize(
    ("try_number", "max_tries", "retries", "cleared"),
    [
        (1, 0, 0, False),
        (2, 2, 2, False),
        (3, 2, 2, False),
        (2, 1, 0, True),
        (3, 4, 2, True),
        (4, 4, 2, False),
        (1, None, 0, False),
    ],
)
def test_the_first_try_after_a_clear_is_known(try_number, max_tries, retries, cleared):
    from types import SimpleNamespace

    from airflow_profsched.operators.plan import _cleared

    context = {"ti": SimpleNamespace(try_number=try_number, max_tries=max_tries)}
    assert _cleared(SimpleNamespace(retries=retries), context) is cleared


def test_the_trigger_survives_its_own_serialisation():
    from airflow_profsched.triggers.workload import WorkloadTrigger

    trigger = WorkloadTrigger({"a": 1}, {"b": 2}, cancel_on_kill=False)
    path, arguments = trigger.serialize()
    assert path == "airflow_profsched.triggers.workload.WorkloadTrigger"
    assert WorkloadTrigger(**json.loads(json.dumps(arguments))).serialize() == (path, arguments)
