"""Airflow's side of the directory that the nodes share: what it lays out for an attempt, and how it reads what jobs left.

A job may leave anything there. So nothing is read through a link, from a FIFO or from another user's file, and everything
read has a limit. Blocking; it knows no Airflow. The layout of the directory is in docs/reference/work-dir.md.
"""

from __future__ import annotations

import errno
import grp
import json
import os
import re
import shlex
import shutil
import socket
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from airflow_profsched.cluster.carry import jobside_zip
from airflow_profsched.cluster.exchange import Look, ReadFile, Reply
from airflow_profsched.core.errors import PolicyError, WorkDirError
from airflow_profsched.core.jobs import JobKey, TaskKey
from airflow_profsched.jobside import checkpoints
from airflow_profsched.jobside.files import read_json, write_atomically

_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_ATTEMPT = re.compile(r"attempt-([1-9][0-9]{0,6})")
_MARKER = re.compile(r"rank-[0-9]{1,6}\.end")
_MARKER_BYTES, _ALL_MARKERS_BYTES, _MOST_MARKERS = 64 << 10, 16 << 20, 4096
_DIR = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class AttemptExistsError(WorkDirError):
    """Somebody has taken this attempt's number: an earlier submission is possible."""


@dataclass(frozen=True, slots=True)
class Sharing:
    """Who may read what Airflow writes there.

    Args:
        group: the group of all files; empty: the user's own.
        umask: what is withheld.
    """

    group: str = ""
    umask: int = 0o077


@dataclass(frozen=True, slots=True)
class AttemptPaths:
    """Where an attempt's files lie.

    Args:
        work_dir: the cluster's root.
        key: the attempt.
    """

    work_dir: str
    key: JobKey

    @property
    def task_dir(self) -> str:
        """The directory of the task of a DAG run."""
        return f"{self.work_dir}/{self.key.task.path}"

    @property
    def attempt_dir(self) -> str:
        """The attempt's directory."""
        return f"{self.task_dir}/attempt-{self.key.attempt}"

    @property
    def mailbox_dir(self) -> str:
        """Where nodes leave notes."""
        return f"{self.work_dir}/mailbox"

    @property
    def log(self) -> str:
        """What the job wrote to stdout and stderr."""
        return f"{self.attempt_dir}/job.log"

    @property
    def result(self) -> str:
        """Where the program leaves its result."""
        return f"{self.attempt_dir}/result.json"


def default_checkpoint_dir(work_dir: str, task: TaskKey) -> str:
    """Where a task's checkpoints lie unless it names another place: they belong to the task of a DAG run, not to a try."""
    return f"{work_dir}/{task.path}/checkpoints"


def check_work_dir(path: str, cluster: str) -> None:
    """See that the shared directory can be used.

    Args:
        path: `work_dir` of the cluster.
        cluster: its name, for the message.

    Raises:
        WorkDirError: it is not named, not there, or cannot be written.
    """
    if not path:
        raise WorkDirError(
            f"cluster {cluster} has no work_dir: name a directory that its nodes and Airflow share "
            f"(clusters.{cluster}.work_dir in the policy file)"
        )
    if not Path(path).is_absolute():
        raise WorkDirError(
            f"work_dir {path} of cluster {cluster} is not absolute: its nodes would look for it elsewhere"
        )
    if not os.access(path, os.F_OK) or not Path(path).is_dir():  # is_dir() raises where one above may not be entered
        raise WorkDirError(
            f"work_dir {path} of cluster {cluster} is not there, or is no directory, on this host ({socket.gethostname()}): "
            "mount it, or make it for the user Airflow runs as"
        )
    if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
        raise WorkDirError(
            f"work_dir {path} of cluster {cluster} cannot be written by uid {os.geteuid()}: change its owner or mode"
        )


# ------------------------------------------------------------------------------------------------ laying out


@contextmanager
def in_words(what: str, path: str) -> Iterator[None]:
    """Turn the file system's errors into a :class:`WorkDirError` that says what was tried, and what to do."""
    try:
        yield
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        help_ = "free space or raise the quota" if full else "see the directory's owner, mode and mount"
        raise WorkDirError(f"{what} {path} failed: {error.strerror}: {help_}") from error


def prepare_attempt(
    paths: AttemptPaths, spec: Mapping[str, Any], env: Mapping[str, str], script: str, sharing: Sharing = Sharing()
) -> None:
    """Lay out everything that an attempt needs.

    Args:
        paths: where.
        spec: jobside's instructions.
        env: the task's variables; they reach the job byte for byte, in a file for its owner alone.
        script: what is submitted, for the record.
        sharing: who else may read the files.

    Raises:
        AttemptExistsError: somebody has taken this attempt's number.
        WorkDirError: the directory cannot be written.
        PolicyError: a variable or an argument that no process can have.
    """
    variables = env_file(env)  # what cannot be is refused before anything is written
    step = step_script(paths, spec["argv"], spec.get("cwd"))
    old = os.umask(sharing.umask)
    try:
        with in_words("laying out", paths.attempt_dir):
            _make_dirs(paths, spec)
            _claim(paths)
            try:
                Path(paths.attempt_dir).mkdir()
            except FileExistsError:
                raise AttemptExistsError(f"{paths.attempt_dir} is there already") from None
            try:
                _write(paths, "spec.json", json.dumps(spec).encode(), 0o600)
                _write(paths, "env.sh", variables, 0o600)
                _write(paths, "jobside.pyz", jobside_zip(), 0o600)
                _write(paths, "step.sh", step, 0o700)
                _write(paths, "script.sh", script.encode("utf-8", "surrogateescape"), 0o600)
                _share(paths, sharing)
            except (OSError, WorkDirError):
                shutil.rmtree(paths.attempt_dir, ignore_errors=True)  # half an attempt would only fill the disk
                raise
    finally:
        os.umask(old)


def _make_dirs(paths: AttemptPaths, spec: Mapping[str, Any]) -> None:
    wanted = [paths.task_dir, f"{paths.mailbox_dir}/heartbeats", f"{paths.mailbox_dir}/watch"]
    if spec.get("checkpoint_dir"):
        wanted.append(spec["checkpoint_dir"])
    for directory in wanted:
        Path(directory).mkdir(parents=True, exist_ok=True)


def _claim(paths: AttemptPaths) -> None:
    """Write the owner file: a jobside of an earlier attempt that still lives reads there that its time is over."""
    place = f"{paths.task_dir}/owner"
    name, attempt = paths.key.task.name, paths.key.attempt
    owner = _owner(place)
    if owner is not None and owner.get("task") != name:
        raise WorkDirError(f"{paths.task_dir} belongs to {owner.get('task')}, not to {name}: it is left untouched")
    if owner is not None and owner["attempt"] >= attempt:
        raise AttemptExistsError(f"{place} names attempt {owner['attempt']} already")
    write_atomically(place, json.dumps({"version": 1, "task": name, "attempt": attempt}))


def _owner(place: str) -> dict[str, Any] | None:
    try:
        owner: dict[str, Any] = read_json(place)
    except FileNotFoundError:
        return None
    except ValueError:
        owner = {}
    if type(owner.get("attempt")) is not int:
        raise WorkDirError(f"{place} is no owner file of ours: see who wrote it, and move it away")
    return owner


def _write(paths: AttemptPaths, name: str, content: bytes, mode: int) -> None:
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(f"{paths.attempt_dir}/{name}", flags, mode)
    with os.fdopen(handle, "wb") as out:
        out.write(content)


def _share(paths: AttemptPaths, sharing: Sharing) -> None:
    if not sharing.group:
        return
    try:
        gid = grp.getgrnam(sharing.group).gr_gid
    except KeyError as error:
        raise WorkDirError(
            f"the group {sharing.group} (files.group of the cluster) is not known on this host"
        ) from error
    for place in (paths.task_dir, paths.attempt_dir, f"{paths.task_dir}/owner"):
        os.chown(place, -1, gid)


def env_file(env: Mapping[str, str]) -> bytes:
    """Write variables as `export NAME='VALUE'` lines.

    Args:
        env: names and values; a value may hold anything but NUL, undecodable bytes as surrogates.

    Returns:
        The file.

    Raises:
        PolicyError: a name that is none, or a NUL.
    """
    lines = []
    for name, value in env.items():
        if not _ENV_NAME.fullmatch(name):
            raise PolicyError(f"env: {name!r} is no name of a variable (letters, digits and _, no digit first)")
        lines.append(b"export " + name.encode() + b"=" + _encoded(f"env: the value of {name}", value) + b"\n")
    return b"".join(lines)


def _encoded(what: str, text: str) -> bytes:
    """Quote a text for a shell, as the bytes that a process gets."""
    if "\0" in text:
        raise PolicyError(f"{what} holds a NUL, which no process can be given")
    try:
        return shlex.quote(text).encode("utf-8", "surrogateescape")
    except UnicodeEncodeError as error:
        raise PolicyError(f"{what} is no text that can be encoded: {error.reason} at {error.start}") from error


def step_script(paths: AttemptPaths, argv: Collection[str], cwd: str | None) -> bytes:
    """Render what every rank runs: jobside where python3 is new enough, else the bare command.

    Args:
        paths: where the attempt's files lie.
        argv: the command.
        cwd: its working directory; None: the task's.

    Returns:
        A POSIX shell script.

    Raises:
        PolicyError: an argument that no process can have.
    """
    place = _encoded("the attempt's directory", paths.attempt_dir)
    command = b" ".join(_encoded("an argument of the command", word) for word in argv)
    return b"""#!/bin/sh
if python3 -I -c 'import sys; sys.exit(sys.version_info < (3, 6))' 2>/dev/null; then
  exec python3 -I %(place)s/jobside.pyz run %(place)s/spec.json
fi
echo 'profsched: this node has no python3 >= 3.6: the command runs without resume information' >&2
(: > %(place)s/plain)
cd %(cwd)s || exit 1
. %(place)s/env.sh
exec %(command)s
""" % {b"place": place, b"cwd": _encoded("the working directory", cwd or paths.task_dir), b"command": command}


def remove_attempt(paths: AttemptPaths) -> None:
    """Remove the directory of an attempt that was never submitted, and give its number back.

    Args:
        paths: where its files lie.
    """
    shutil.rmtree(paths.attempt_dir, ignore_errors=True)
    body = {"version": 1, "task": paths.key.task.name, "attempt": paths.key.attempt - 1}
    with in_words("writing", f"{paths.task_dir}/owner"):
        write_atomically(f"{paths.task_dir}/owner", json.dumps(body))


def highest_attempt(work_dir: str, task: TaskKey) -> int:
    """Return the highest attempt that has a directory, or that the owner file names; 0 where there is none."""
    place = f"{work_dir}/{task.path}"
    try:
        attempts = [int(match.group(1)) for name in os.listdir(place) if (match := _ATTEMPT.fullmatch(name))]
    except OSError:
        return 0
    try:
        owner = _owner(f"{place}/owner") or {}
    except (OSError, WorkDirError):
        owner = {}
    if owner.get("task") == task.name:  # it is written before the directory is made
        attempts.append(owner["attempt"])
    return max(attempts, default=0)


def set_checkpoints_aside(work_dir: str, task: TaskKey) -> str:
    """Move a task's checkpoints away, for a run that starts afresh; nothing is deleted.

    Args:
        work_dir: the cluster's root.
        task: the task.

    Returns:
        Where they lie now; empty where there were none.
    """
    old = Path(default_checkpoint_dir(work_dir, task))
    if not old.is_dir() or not any(old.iterdir()):
        return ""
    aside = old.with_name(f"checkpoints.before-{time.strftime('%Y%m%dT%H%M%S', time.gmtime())}-{os.getpid()}")
    with in_words("moving aside", str(old)):
        old.rename(aside)
    return str(aside)


# ------------------------------------------------------------------------------------------------ reading


@contextmanager
def _opened(work_dir: str, path: str, flags: int) -> Iterator[int]:
    """Open a path below a root, no component of which may be a link."""
    relative = os.path.relpath(path, work_dir)
    if relative.startswith(".."):
        raise OSError(errno.EACCES, f"is not below {work_dir}", path)
    parts = [part for part in relative.split("/") if part != "."]
    handle = os.open(work_dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            inner = os.open(part, flags if last else _DIR, dir_fd=handle)
            os.close(handle)
            handle = inner
        yield handle
    finally:
        os.close(handle)


def _regular(handle: int, work_dir: str, name: str) -> os.stat_result:
    info = os.fstat(handle)
    if not stat.S_ISREG(info.st_mode):
        raise OSError(errno.EINVAL, "is no regular file: not read", name)
    if info.st_uid not in (os.geteuid(), os.stat(work_dir).st_uid):
        raise OSError(errno.EPERM, f"belongs to uid {info.st_uid}: not read", name)
    return info


def read_tail(request: ReadFile) -> Reply:
    """Read the end of a file that a job wrote.

    Args:
        request: which, and how much.

    Returns:
        The text (undecodable bytes replaced), or the errno and what is wrong, in words.
    """
    try:
        with _opened(request.work_dir, request.path, _FILE) as handle:
            size = _regular(handle, request.work_dir, request.path).st_size
            start = max(0, size - request.max_bytes)
            content = os.pread(handle, request.max_bytes, start)
    except OSError as error:
        return Reply(error.errno or errno.EIO, "", _words(request.path, error))
    text = content.decode("utf-8", "replace")
    return Reply(0, f"[… the first {start} bytes are left out …]\n{text}" if start else text)


def _words(path: str, error: OSError) -> str:
    link = error.errno == errno.ELOOP
    return f"{path}: is a symbolic link: not followed" if link else f"{path}: {error.strerror}"


def look(request: Look) -> Reply:
    """Look at what an attempt left: its end markers, and the newest complete checkpoint.

    Args:
        request: where.

    Returns:
        JSON, as `findings_from_json` reads it.
    """
    markers: list[dict[str, Any]] = []
    strange: list[str] = []
    plain = False
    try:
        with _opened(request.work_dir, request.attempt_dir, _DIR) as handle:
            names = os.listdir(handle)
            plain = "plain" in names
            markers = _markers(request, handle, names, strange)
    except OSError as error:
        strange.append(_words(request.attempt_dir, error))
    body = {
        "markers": markers,
        "plain": plain,
        "checkpoint": checkpoints.view_checkpoints(request.checkpoint_dir, request.layout),
        "strange": strange,
    }
    return Reply(0, json.dumps(body))


def _markers(request: Look, handle: int, names: Collection[str], strange: list[str]) -> list[dict[str, Any]]:
    """Read the end markers in an open directory; what is not believed is told in `strange`."""
    wanted = sorted((name for name in names if _MARKER.fullmatch(name)), key=lambda name: (len(name), name))
    if len(wanted) > _MOST_MARKERS:
        strange.append(f"{request.attempt_dir}: {len(wanted)} end markers, of which {_MOST_MARKERS} are read")
    found, left = [], _ALL_MARKERS_BYTES
    for name in wanted[:_MOST_MARKERS]:
        try:
            content = _marker_content(request.work_dir, handle, name, left)
            left -= len(content)
            found.append(_marker(content))
        except OSError as error:
            strange.append(_words(f"{request.attempt_dir}/{name}", error))
        except (ValueError, RecursionError) as error:
            strange.append(f"{request.attempt_dir}/{name}: is no JSON object ({error})")
    return found


def _marker_content(work_dir: str, directory: int, name: str, most: int) -> bytes:
    handle = os.open(name, _FILE, dir_fd=directory)
    try:
        if _regular(handle, work_dir, name).st_size > min(_MARKER_BYTES, most):
            raise OSError(errno.EFBIG, "is larger than a marker can be: not read", name)
        return os.pread(handle, _MARKER_BYTES, 0)
    finally:
        os.close(handle)


def _marker(content: bytes) -> dict[str, Any]:
    body = json.loads(content)
    if not isinstance(body, dict):
        raise ValueError("not a mapping")  # noqa: TRY004 - read together with JSON's own errors
    return {name: value for name, value in body.items() if value is None or isinstance(value, (str, int, float))}


def read_spec(work_dir: str, key: JobKey) -> dict[str, Any]:
    """Read an attempt's instructions, as they were laid out.

    Args:
        work_dir: the cluster's root.
        key: the attempt.

    Returns:
        The spec; empty where it cannot be read.
    """
    paths = AttemptPaths(work_dir, key)
    reply = read_tail(ReadFile(work_dir, f"{paths.attempt_dir}/spec.json", 16 << 20))
    try:
        body = json.loads(reply.out) if not reply.code else {}
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
