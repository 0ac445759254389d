"""Debian packages that the throwaway parts need, installed where that can be done."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

SLURM = ("slurmctld", "slurmd", "slurm-client", "slurmdbd", "munge", "mariadb-server")
LOCK = Path("/var/lock/airflow-profsched-packages")
POLICY = Path("/usr/sbin/policy-rc.d")


class Unavailable(RuntimeError):
    """Something cannot be had on this machine; the message says what, and what would help."""


def ensure(packages: Sequence[str]) -> None:
    """Install the packages that are missing; services that they bring are not started.

    Args:
        packages: Debian's names.

    Raises:
        Unavailable: they are missing and cannot be installed here.
    """
    if not _missing(packages):
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Unavailable(
            f"the Debian packages {', '.join(_missing(packages))} are missing, and only root with apt-get can install "
            "them: run this as root on Debian or Ubuntu, or install them first"
        )
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two test runs may start at once
        missing = _missing(packages)
        if missing:
            print(f"installing {' '.join(missing)} …", flush=True)
            began = time.monotonic()
            with _no_services():
                _apt(missing)
            print(f"installed in {time.monotonic() - began:.0f} s", flush=True)


def _missing(packages: Sequence[str]) -> list[str]:
    if shutil.which("dpkg-query") is None:
        return list(packages)
    asked = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *packages],
        capture_output=True,
        text=True,
        check=False,
    )
    present = {line.split()[0] for line in asked.stdout.splitlines() if line.endswith(" installed")}
    return [name for name in packages if name not in present]


def _apt(packages: Sequence[str]) -> None:
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    patient = ("-o", "DPkg::Lock::Timeout=300")  # another apt may be at work on a machine that has just booted
    install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *patient, *packages]
    done = subprocess.run(install, env=env, capture_output=True, text=True, check=False)
    if done.returncode:  # a new machine has old lists of packages, or none
        subprocess.run(["apt-get", "update", "-qq"], env=env, capture_output=True, check=False)
        done = subprocess.run(install, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        tail = "\n".join((done.stdout + done.stderr).splitlines()[-15:])
        raise Unavailable(f"apt-get could not install {' '.join(packages)} (exit {done.returncode}):\n{tail}")


@contextmanager
def _no_services() -> Iterator[None]:
    """Keep invoke-rc.d from starting the daemons that the packages bring: ours run from temporary directories."""
    aside = POLICY.with_name("policy-rc.d.profsched-aside")
    if POLICY.exists() and not aside.exists():  # the machine's own, not what a killed run of ours has left
        POLICY.rename(aside)
    POLICY.write_text("#!/bin/sh\nexit 101\n", encoding="utf-8")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink(missing_ok=True)
        if aside.exists():
            aside.rename(POLICY)
