"""`profsched explain`, `profsched policy`: questions to the policy alone."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from airflow_profsched.cluster.scheduler import Order
from airflow_profsched.cluster.workdir import AttemptPaths
from airflow_profsched.core.errors import PolicyError
from airflow_profsched.core.jobs import JobKey, TaskKey
from airflow_profsched.core.placement import Placement, TaskRequest, resolve
from airflow_profsched.core.policy import PolicyFile
from airflow_profsched.core.profiles import Checkpoint, Resources
from airflow_profsched.hooks.policy import load_policy, policy_path
from airflow_profsched.slurm.scheduler import SlurmScheduler


def validate(args: argparse.Namespace) -> int:
    """Check a policy file.

    Args:
        args: `file`.

    Returns:
        The exit status.

    Raises:
        PolicyError: it is wrong.
    """
    path = args.file or policy_path()
    if not path:
        raise PolicyError(
            "no policy file is named: give one, or set [profsched] policy_file in Airflow's configuration"
        )
    policy = load_policy(path)
    file = policy.file
    print(f"{path}: fine: profiles {', '.join(file.profiles)}; clusters {', '.join(file.clusters) or '(none)'}")
    return 0


def schema(args: argparse.Namespace) -> int:  # noqa: ARG001 - a command's signature
    """Print the JSON Schema of policy files."""
    print(json.dumps(policy_schema(), indent=2))
    return 0


def policy_schema() -> dict[str, Any]:
    """Return the JSON Schema of policy files."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "airflow-profsched policy",
        **PolicyFile.model_json_schema(),
    }


def explain(args: argparse.Namespace) -> int:
    """Show where tasks would run.

    Args:
        args: a DAG file, or what is asked for.

    Returns:
        The exit status.

    Raises:
        PolicyError: the policy does not offer it.
    """
    policy = load_policy(args.policy)
    asked = list(_of_file(args)) if args.dag_file else [(_of_options(args), ("your", "program"))]
    if not asked:
        raise PolicyError(f"{args.dag_file} holds no workload task" + (f" {args.task}" if args.task else ""))
    shown = [_shown(resolve(policy, request), request) for request, _ in asked]
    if args.json:
        print(json.dumps(shown, indent=2))
    else:
        print("\n\n".join(_words(one) for one in shown))
    return 0


def _of_options(args: argparse.Namespace) -> TaskRequest:
    try:
        resources = Resources(
            nodes=args.nodes,
            gpus=args.gpus,
            gpu_type=args.gpu_type,
            cpus=args.cpus,
            memory=args.memory,
            walltime=args.walltime,
        )
    except ValueError as error:
        raise PolicyError(str(error)) from error
    return TaskRequest(
        resources,
        args.profile,
        cluster=args.cluster,
        project=args.project,
        image=args.image,
        dag_id="dag",
        task_id=args.task or "task",
        owner=args.owner,
    )


def _of_file(args: argparse.Namespace) -> Iterator[tuple[TaskRequest, tuple[str, ...]]]:
    from airflow_profsched.operators import WorkloadOperator  # noqa: PLC0415 - Airflow starts for DAG files alone

    for dag in _dags(Path(args.dag_file)):
        for task in dag.tasks:
            operator = task if isinstance(task, WorkloadOperator) else _unmapped(task)
            if operator is not None and args.task in (None, task.task_id, f"{dag.dag_id}.{task.task_id}"):
                yield _request(operator, dag), tuple(map(str, operator.command))


def _dags(path: Path) -> list[Any]:
    from airflow.sdk import DAG  # noqa: PLC0415 - likewise
    from airflow.sdk.definitions._internal.contextmanager import DagContext  # noqa: PLC0415 - see below

    spec = importlib.util.spec_from_file_location(f"profsched_explained_{path.stem}", path)
    if spec is None or spec.loader is None or not path.exists():
        raise PolicyError(f"{path} is no file of Python")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))  # Airflow puts the folder of DAGs there as well
    sys.modules[module.__name__] = module
    # As Airflow's own DagBag finds them: by a module's variables, and by `with DAG(…):` without a name.
    DagContext.current_autoregister_module_name = module.__name__
    try:
        spec.loader.exec_module(module)
    finally:
        DagContext.current_autoregister_module_name = None
    registered = [dag for dag, owner in DagContext.autoregistered_dags if owner is module]
    named = [value for value in vars(module).values() if isinstance(value, DAG)]
    return list({dag.dag_id: dag for dag in (*named, *registered)}.values())


def _unmapped(task: Any) -> Any:
    """A mapped task, as far as its arguments are known before it is expanded."""
    from airflow_profsched.operators import WorkloadOperator  # noqa: PLC0415 - likewise

    kind = getattr(task, "operator_class", None)
    if not (isinstance(kind, type) and issubclass(kind, WorkloadOperator)):
        return None
    known = dict(task.partial_kwargs)
    names = ("needs", "profile", "checkpoint", "image", "project", "cluster", "overrides", "budgets", "command")
    return kind(
        task_id=task.task_id, **({"command": ["(mapped)"]} | {name: known[name] for name in names if name in known})
    )


def _request(operator: Any, dag: Any) -> TaskRequest:
    from airflow_profsched.operators.plan import model  # noqa: PLC0415 - likewise

    return TaskRequest(
        resources=model(Resources, operator.needs, operator.task_id) or Resources(),
        profile=operator.profile,
        checkpoint=model(Checkpoint, operator.checkpoint, operator.task_id),
        cluster=operator.cluster,
        project=operator.project,
        overrides=operator.overrides or {},
        dag_id=dag.dag_id,
        task_id=operator.task_id,
        owner=str(operator.owner),
        dag_tags=tuple(sorted(dag.tags)),
        image=operator.image or "",
        budgets=operator.budgets,
    )


def _shown(placed: Placement, request: TaskRequest) -> dict[str, Any]:
    key = JobKey(TaskKey(request.dag_id, "the run", request.task_id), 1)
    paths = AttemptPaths(placed.work_dir or "WORK_DIR", key)
    order = Order(key, "0" * 32, paths.attempt_dir)
    return {
        "task": f"{request.dag_id}.{request.task_id}",
        "placement": placed.model_dump(mode="json", exclude={"reasons"}),
        "reasons": list(placed.reasons),
        "script": SlurmScheduler(placed).render(order),
    }


def _words(shown: dict[str, Any]) -> str:
    placed = shown["placement"]
    lines = [f"{shown['task']}: profile {placed['profile']} on cluster {placed['cluster']}", "", "Why:"]
    lines += [f"  - {reason}" for reason in shown["reasons"]]
    return "\n".join([*lines, "", "The batch script (of a first attempt):", "", shown["script"].rstrip()])
