"""Ordinary users: root and SlurmUser stand above Slurm's limits, so nothing that is tested may run as they."""

from __future__ import annotations

import fcntl
import os
import pwd
import subprocess
from collections.abc import Mapping
from typing import Any

from throwaway.packages import LOCK, Unavailable

USER = "profsched"
OTHER = "profsched2"


def ensure(name: str) -> pwd.struct_passwd:
    """Make sure that an ordinary user exists.

    Args:
        name: the user's name.

    Returns:
        Its entry in the passwd database.

    Raises:
        Unavailable: it does not exist and cannot be made here.
    """
    try:
        return pwd.getpwnam(name)
    except KeyError:
        if os.geteuid() != 0:
            raise Unavailable(f"the user {name} does not exist, and only root can make it") from None
    LOCK.parent.mkdir(parents=True, exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        argv = ["useradd", "--create-home", "--home-dir", f"/var/lib/{name}", "--shell", "/bin/bash", name]
        done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 9):  # 9: somebody else was quicker
        raise Unavailable(f"useradd could not make the user {name}: {done.stderr.strip()}")
    return pwd.getpwnam(name)


def run_as(name: str | None, env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Say how `subprocess` starts a process as a user.

    Args:
        name: the user; None, or the user this process runs as: no change.
        env: variables that it gets besides a plain environment.

    Returns:
        Arguments for `subprocess.Popen`: `user`, `group`, `extra_groups` and a clean `env`.
    """
    entry = pwd.getpwuid(os.geteuid()) if name is None else pwd.getpwnam(name)
    plain = {
        "HOME": entry.pw_dir,
        "USER": entry.pw_name,
        "LOGNAME": entry.pw_name,
        "SHELL": entry.pw_shell,
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
    }
    options: dict[str, Any] = {"env": {**plain, **(env or {})}}
    if entry.pw_uid != os.geteuid():
        groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
        options |= {"user": entry.pw_uid, "group": entry.pw_gid, "extra_groups": groups}
    return options
