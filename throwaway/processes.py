"""Which processes belong to a throwaway cluster, told from /proc: pids alone are reused and may be a stranger's."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

PROC = Path("/proc")
CLIENTS = frozenset({"srun", "salloc", "sbatch", "scancel", "squeue", "sinfo", "sacct", "scontrol", "sacctmgr"})
DAEMONS = ("slurm", "munged", "mariadbd")


def started(pid: int) -> int | None:
    """Say when a process was started: with the pid, this names a process for good.

    Args:
        pid: the process.

    Returns:
        Clock ticks since boot; None where there is no such process, or only its remains.
    """
    fields = _stat(pid)
    return None if fields is None or fields[0] in ("Z", "X") else int(fields[19])


def wait_end(pid: int, seconds: float) -> bool:
    """Wait for the end of a process that is no child of ours.

    Args:
        pid: the process.
        seconds: how long.

    Returns:
        Whether it has ended.
    """
    until = time.monotonic() + seconds
    while started(pid) is not None:
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def kill_all_of(directory: Path) -> None:
    """End what no pid of ours names: slurmstepd, jobs, and what works inside the cluster's directory.

    Such a process carries the cluster's SLURM_CONF, or descends from one that does (a job may empty its environment).
    The variable alone proves nothing: whoever has exported it in a shell wants to keep that shell, and make, and an editor.
    What a job has started *without* environment *and* has outlived is not found; Slurm itself has lost it then.

    Args:
        directory: where the cluster lives.

    Raises:
        RuntimeError: something does not end.
    """
    until = time.monotonic() + 10
    while found := of(directory):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > until:
            raise RuntimeError(f"processes of the cluster in {directory} do not end after SIGKILL: {sorted(found)}")
        time.sleep(0.02)


def of(directory: Path) -> set[int]:
    """Find the processes of a cluster.

    Args:
        directory: where it lives.

    Returns:
        Their pids, without this process and those that it runs below.
    """
    parents = {pid: int(fields[1]) for pid in _pids() if (fields := _stat(pid)) and fields[0] not in ("Z", "X")}
    found = {pid for pid in parents if _belongs(pid, directory)}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found - _line_of(os.getpid(), parents)


def _belongs(pid: int, directory: Path) -> bool:
    environ = b"\0" + _read(pid, "environ")
    if f"\0SLURM_CONF={directory}/".encode() not in environ:
        return False
    name = _read(pid, "comm").decode(errors="replace").strip()
    return b"\0SLURM_JOB_ID=" in environ or name in CLIENTS or name.startswith(DAEMONS) or _works_in(pid, directory)


def _works_in(pid: int, directory: Path) -> bool:
    try:
        return (PROC / str(pid) / "cwd").readlink().is_relative_to(directory)
    except OSError:
        return False


def _line_of(pid: int, parents: dict[int, int]) -> set[int]:
    line = set()
    while pid > 0 and pid not in line:
        line.add(pid)
        pid = parents.get(pid, 0)
    return line


def _pids() -> list[int]:
    return [int(entry.name) for entry in PROC.iterdir() if entry.name.isdigit()]


def _stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state on: the name before them may hold blanks and brackets."""
    text = _read(pid, "stat").decode(errors="replace")
    return text.rpartition(")")[2].split() or None


def _read(pid: int, name: str) -> bytes:
    try:
        return (PROC / str(pid) / name).read_bytes()
    except OSError:
        return b""
