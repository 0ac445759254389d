"""Runs one workload task through Airflow's own `dag.test()`: real deferral, real triggers, real retries, no services.

Run by the environment's python as an ordinary user: `python one_task.py SPEC.json`. The spec holds the operator's class and
arguments; what came of it is written as JSON to the spec's `out`.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any


def build(spec: dict[str, Any]) -> Any:
    """Make the DAG of one task.

    Args:
        spec: `dag_id`, `operator` (a class of airflow_profsched.operators) and its `arguments`.

    Returns:
        The DAG.
    """
    from airflow.sdk import DAG  # noqa: PLC0415 - the environment is set by the caller

    from airflow_profsched import operators  # noqa: PLC0415 - likewise

    arguments = dict(spec["arguments"])
    for name in ("execution_timeout", "retry_delay"):
        if name in arguments:
            arguments[name] = timedelta(seconds=arguments[name])
    if spec.get("calls"):
        for name in ("preempted", "resumed"):
            arguments[f"on_{name}"] = _noting(Path(spec["calls"]), name)
    with DAG(spec["dag_id"], schedule=None, tags=spec.get("tags", [])) as dag:
        getattr(operators, spec["operator"])(task_id=spec.get("task_id", "work"), **arguments)
    return dag


def _noting(place: Path, name: str) -> Callable[[Any], None]:
    """A callback that notes that it was called, and for which task."""

    def note(context: Any) -> None:
        with place.open("a", encoding="utf-8") as out:
            out.write(f"{name} {context['ti'].task_id}\n")

    return note


def serialise(dag: Any) -> None:
    """Put a DAG into the database, as the DAG processor would.

    Args:
        dag: the DAG.
    """
    from airflow.dag_processing.bundles.manager import DagBundlesManager  # noqa: PLC0415 - likewise
    from airflow.models.serialized_dag import SerializedDagModel  # noqa: PLC0415 - likewise
    from airflow.serialization.definitions.dag import SerializedDAG  # noqa: PLC0415 - likewise
    from airflow.serialization.serialized_objects import LazyDeserializedDAG  # noqa: PLC0415 - likewise
    from airflow.utils.session import create_session  # noqa: PLC0415 - likewise

    with create_session() as session:
        DagBundlesManager().sync_bundles_to_db(session=session)
        session.flush()
        lazy = LazyDeserializedDAG.from_dag(dag)
        SerializedDAG.bulk_write_to_db("dags-folder", None, [lazy], session=session)
        SerializedDagModel.write_dag(lazy, bundle_name="dags-folder", session=session)


def outcome(dag_run: Any, task_id: str) -> dict[str, Any]:
    """Read what came of the task.

    Args:
        dag_run: the DAG run.
        task_id: the task.

    Returns:
        Its states, tries and XComs.
    """
    from airflow.models.xcom import XComModel  # noqa: PLC0415 - likewise
    from airflow.utils.session import create_session  # noqa: PLC0415 - likewise

    with create_session() as session:
        rows = session.query(XComModel).filter(XComModel.run_id == dag_run.run_id).all()
        xcoms = {row.key: XComModel.deserialize_value(row) for row in rows}
    instance = dag_run.get_task_instance(task_id)
    return {
        "state": str(getattr(instance.state, "value", instance.state)),
        "run_id": dag_run.run_id,
        "try_number": instance.try_number,
        "result": xcoms.get("return_value"),
        "record": xcoms.get("profsched"),
    }


def main() -> None:
    """Run the task that the first argument's file describes."""
    spec = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    logging.basicConfig(level=logging.INFO)
    try:
        dag = build(spec)
        serialise(dag)
        answer = outcome(dag.test(), spec.get("task_id", "work"))
    except Exception:  # noqa: BLE001 - whatever it was, whoever started this has to see it
        answer = {"state": "broken", "error": traceback.format_exc()}
    out = Path(spec["out"])
    out.with_suffix(".tmp").write_text(json.dumps(answer, default=str), encoding="utf-8")
    out.with_suffix(".tmp").rename(out)


if __name__ == "__main__":
    main()
