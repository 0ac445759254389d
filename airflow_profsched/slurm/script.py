"""The batch script: directives from a placement, the site's own lines, then jobside as a step."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from airflow_profsched.cluster.scheduler import Order
from airflow_profsched.core import units
from airflow_profsched.core.errors import SubmitError
from airflow_profsched.core.placement import SlurmPlacement
from airflow_profsched.slurm import records


def render(placement: SlurmPlacement, order: Order) -> str:
    """Render the batch script of an attempt.

    The last line replaces the shell by srun: with GraceTime 0 the shell gets the SIGTERM as well, and would die of it and
    take the job's tail with it. jobside is the step, since the batch script is not told of a preemption.

    Args:
        placement: what the policy decided.
        order: the attempt.

    Returns:
        The script.

    Raises:
        SubmitError: a value that would be more than a value in a directive.
    """
    shell = "#!/bin/bash -l" if placement.login_shell else "#!/bin/bash"
    directives = [f"#SBATCH {_directive(option, value)}" for option, value in options(placement, order)]
    step = " ".join(shlex.quote(word) for word in _step(placement, order))
    return "\n".join([shell, *directives, "", *placement.setup, f"exec {step}", ""])


def options(placement: SlurmPlacement, order: Order) -> Iterator[tuple[str, str]]:
    """Yield sbatch's options for an attempt, as long name and value.

    Args:
        placement: what the policy decided.
        order: the attempt.

    Yields:
        Pairs; the value is empty for an option without one.
    """
    needs = placement.resources
    yield "job-name", order.key.task.name
    yield "comment", records.comment(order.key.attempt, order.nonce, order.try_number, placement.profile)
    yield "output", f"{_literal(order.attempt_dir)}/job.log"
    yield "open-mode", "append"
    yield "chdir", order.attempt_dir
    yield "no-requeue", ""  # one job per attempt: see docs/explanation/architecture.md
    yield "export", "ALL"  # of a clean environment of our own making
    yield from _place(placement)
    yield "nodes", str(needs.nodes)
    yield "ntasks-per-node", str(needs.tasks_per_node)
    if needs.cpus is not None:
        yield "cpus-per-task", str(max(1, needs.cpus // needs.tasks_per_node))
    if needs.mem_mib is not None:
        yield "mem", f"{needs.mem_mib}M"
    if needs.gpus:
        yield _gpus(placement)
    yield "time", units.slurm_time(placement.walltime_s)
    if placement.signal:
        yield "signal", placement.signal
    if order.excluded:
        yield "exclude", ",".join(order.excluded)
    for name, value in placement.overrides:
        yield name.replace("_", "-"), value


def _place(placement: SlurmPlacement) -> Iterator[tuple[str, str]]:
    given = (
        ("partition", placement.partition),
        ("qos", placement.qos),
        ("account", placement.account),
        ("constraint", placement.constraint),
    )
    yield from ((name, value) for name, value in given if value)


def _gpus(placement: SlurmPlacement) -> tuple[str, str]:
    """Ask in the cluster's one form: mixing them conflicts."""
    needs = placement.resources
    kind = f"{placement.gpu_type}:" if placement.gpu_type else ""
    if placement.gpu_form == "gres":
        return "gres", f"gpu:{kind}{needs.gpus}"
    if placement.gpu_form == "gpus":
        return "gpus", f"{kind}{needs.gpus_total}"
    return "gpus-per-node", f"{kind}{needs.gpus}"


def _step(placement: SlurmPlacement, order: Order) -> list[str]:
    needs = placement.resources
    words = ["srun", "--export=ALL", "--kill-on-bad-exit=1", f"--nodes={needs.nodes}"]
    words += [f"--ntasks-per-node={needs.tasks_per_node}", f"--ntasks={needs.nodes * needs.tasks_per_node}"]
    if needs.cpus is not None:  # from 22.05 on a step does not inherit it
        words.append(f"--cpus-per-task={max(1, needs.cpus // needs.tasks_per_node)}")
    if needs.nodes * needs.tasks_per_node > 1:
        words.append("--label")
    return [*words, "/bin/sh", f"{order.attempt_dir}/step.sh"]


def _literal(path: str) -> str:
    """Escape a path in which Slurm would replace %-patterns (a backslash would switch that off for all of it)."""
    return path.replace("%", "%%")


def _directive(option: str, value: str) -> str:
    if any(char < " " or char in "\"'\\`#" or char == "\x7f" for char in value) or value.startswith("-"):
        raise SubmitError(
            f"sbatch --{option}: {value!r} cannot stand in a batch script: choose a name without quotes, # or \\"
        )
    if not value:
        return f"--{option}"
    return f'--{option}="{value}"' if " " in value else f"--{option}={value}"
