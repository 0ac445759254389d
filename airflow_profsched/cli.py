"""`profsched`: what the policy would do, what this host can reach, and what jobs there are. Works without a running Airflow."""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from airflow_profsched.core.errors import ProfschedError

Handler = Callable[[argparse.Namespace], int]


def main(argv: Sequence[str] | None = None) -> int:
    """Be the command line.

    Args:
        argv: the arguments; None: the process's own.

    Returns:
        The exit status: 0, or 1 where something is wrong, 2 for a wrong call.
    """
    parser = build_parser()
    args = parser.parse_args(argv)
    logging.getLogger().setLevel(logging.ERROR)
    handler: Handler = args.handler
    try:
        return handler(args)
    except ProfschedError as error:
        print(f"profsched: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def build_parser() -> argparse.ArgumentParser:
    """Make the parser; each command's code is imported when it runs."""
    parser = argparse.ArgumentParser(prog="profsched", description=__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _explain(commands)
    _policy(commands)
    _doctor(commands)
    _jobs(commands)
    return parser


def _explain(commands: Any) -> None:
    text = "Show where a task would run, the batch script, and what decided, without submitting anything."
    parser = commands.add_parser("explain", help="show placement, script and reasons", description=text)
    parser.add_argument("dag_file", nargs="?", help="a DAG file; else say what is asked for with the options below")
    parser.add_argument("--task", help="the task, as dag_id.task_id or task_id; all workload tasks by default")
    parser.add_argument("--profile", help="workload profile; without it the policy's rules decide")
    parser.add_argument("--cluster", help="pin a cluster")
    parser.add_argument("--project", help="project")
    parser.add_argument("--image", default="", help="container image")
    parser.add_argument("--owner", default="", help="the task's owner")
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--gpus", type=int, default=0, help="on each node")
    parser.add_argument("--gpu-type", default="")
    parser.add_argument("--cpus", type=int, help="on each node")
    parser.add_argument("--memory", help="on each node, such as 512Gi")
    parser.add_argument("--walltime", help="such as 24h")
    _with_policy(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(handler=_run("explain"))


def _policy(commands: Any) -> None:
    parser = commands.add_parser("policy", help="check the policy file")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    validate = verbs.add_parser("validate", help="say what is wrong with a policy file, with file and line")
    validate.add_argument("file", nargs="?", help="the file; [profsched] policy_file by default")
    validate.set_defaults(handler=_run("validate"), policy=None)
    schema = verbs.add_parser("schema", help="print the JSON Schema of policy files")
    schema.set_defaults(handler=_run("schema"))


def _doctor(commands: Any) -> None:
    text = "Say what this host can reach, and what is missing. Exit status 1 if anything is."
    parser = commands.add_parser("doctor", help="say what this host can reach", description=text)
    _with_policy(parser)
    parser.add_argument("--write-policy", metavar="FILE", help="draft a policy file from what the cluster has")
    parser.add_argument("--work-dir", default="/shared/airflow", help="for the draft: the directory that nodes share")
    parser.set_defaults(handler=_run("doctor"))


def _jobs(commands: Any) -> None:
    jobs = commands.add_parser("jobs", help="list the live jobs that this user's Airflow has submitted")
    _with_policy(jobs)
    jobs.add_argument("--cluster", help="one cluster of the policy alone")
    jobs.add_argument("--json", action="store_true", help="print JSON")
    jobs.set_defaults(handler=_run("jobs"))
    text = "List live jobs that no Airflow process has waited for in 15 minutes."
    orphans = commands.add_parser("orphans", help="list live jobs that nobody waits for", description=text)
    _with_policy(orphans)
    orphans.add_argument("--cluster", help="one cluster of the policy alone")
    orphans.add_argument("--json", action="store_true", help="print JSON")
    orphans.add_argument("--cancel", action="store_true", help="cancel them")
    orphans.add_argument("--force", action="store_true", help="cancel although Airflow cannot be asked")
    orphans.add_argument("--after", default="15m", metavar="TIME", help="how long nobody has waited (15m)")
    orphans.add_argument("--airflow", metavar="URL", help="Airflow's address; with AIRFLOW_TOKEN in the environment")
    orphans.set_defaults(handler=_run("orphans"))


def _with_policy(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--policy", metavar="FILE", help="the policy file; [profsched] policy_file by default")


def _run(name: str) -> Handler:
    def run(args: argparse.Namespace) -> int:
        from airflow_profsched import commands  # noqa: PLC0415 - `profsched --help` starts no Airflow

        handler: Handler = getattr(commands, name)
        return handler(args)

    return run


def as_json(value: object) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2, default=str))


if __name__ == "__main__":
    sys.exit(main())
