"""`make playground`: a Slurm and an Airflow in a directory with a fixed name, kept up until Enter or Ctrl-C."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from throwaway.airflow import AirflowStack
from throwaway.demo import say, set_up
from throwaway.packages import Unavailable
from throwaway.slurm import ThrowawaySlurm

PLACE = Path("/tmp/profsched-playground")  # noqa: S108 - the tutorial names it, and it must be enterable by the ordinary user

TEXT = """
Airflow's UI is at {address} (no password).
DAG files belong into {dags}; jobs' files are below {work_dir}.
{run} COMMAND … runs a command as the user of Airflow and of the jobs, for example:

    {run} sinfo
    {run} profsched doctor
    {run} airflow dags trigger profsched_training

"""


def write_run(place: Path, airflow: AirflowStack) -> Path:
    """Write the script that runs a command as the ordinary user, in Airflow's environment.

    Args:
        place: where.
        airflow: the Airflow.

    Returns:
        The script.
    """
    script = place / "as-user"
    pairs = " ".join(shlex.quote(f"{name}={value}") for name, value in sorted(airflow.variables.items()))
    user = shlex.quote(airflow.user or "")
    script.write_text(
        f'#!/bin/sh\ncd {shlex.quote(str(airflow.home))}\nexec runuser -u {user} -- env {pairs} "$@"\n',
        encoding="utf-8",
    )
    script.chmod(0o700)  # it holds the secret that Airflow's processes share
    return script


def main() -> int:
    """Bring the playground up, and take it down at Enter or Ctrl-C.

    Returns:
        0, or 1 where it cannot be had here.
    """
    say("starting a Slurm of two nodes with 4 (fake) GPUs each, accounting and QoS")
    slurm = ThrowawaySlurm(directory=PLACE)
    try:
        slurm.up()
    except Unavailable as error:
        say(f"the playground needs a Slurm, and there can be none here: {error}")
        return 1
    airflow = None
    try:
        airflow = set_up(slurm)
        say("starting Airflow's four processes")
        airflow.up()
        run = write_run(slurm.dir, airflow)
        print(TEXT.format(address=airflow.address, dags=airflow.dags, work_dir=slurm.work_dir, run=run), flush=True)
        input("Enter ends everything. ")
    except (KeyboardInterrupt, EOFError):
        print()
    finally:
        if airflow is not None:
            airflow.down()
        slurm.down()
    return 0


if __name__ == "__main__":
    sys.exit(main())
