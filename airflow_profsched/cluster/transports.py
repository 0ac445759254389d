"""Who carries requests: a process on this host, blocking or async. The rules they share stand beside them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_profsched.cluster import workdir
from airflow_profsched.cluster.exchange import Command, Look, ReadFile, Reply, Request
from airflow_profsched.core.errors import ClusterUnavailableError, LostReplyError

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:/opt/slurm/bin"
_AFTER_KILL_S = 5.0
_PIPES: dict[str, Any] = {  # a directory that is always there, and a process group of its own
    "stdin": subprocess.PIPE,
    "stdout": subprocess.PIPE,
    "stderr": subprocess.PIPE,
    "cwd": "/",
    "start_new_session": True,
}


@dataclass(frozen=True, slots=True)
class _Local:
    """Where commands are, and what they see.

    Args:
        bin_dir: their directory; empty: the usual ones.
        env: variables besides a plain environment, such as SLURM_CONF.
    """

    bin_dir: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    def argv(self, command: Command) -> list[str]:
        """Return the vector with the program's whole path."""
        path = f"{self.bin_dir}:{_PATH}" if self.bin_dir else _PATH
        program = shutil.which(command.argv[0], path=path)
        if program is None:
            raise ClusterUnavailableError(
                f"the command {command.argv[0]} is not on this host ({path}): install the cluster's client, "
                "or name its directory in [profsched] slurm_bin_dir"
            )
        return [program, *command.argv[1:]]

    def environment(self, command: Command) -> dict[str, str]:
        """A clean environment of our own making: the worker's SLURM_* and SBATCH_* would be options of our commands."""
        user = pwd.getpwuid(os.geteuid())
        plain = {
            "HOME": user.pw_dir,
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
            "SHELL": user.pw_shell or "/bin/sh",
        }
        fixed = {
            "PATH": f"{self.bin_dir}:{_PATH}" if self.bin_dir else _PATH,
            "LC_ALL": "C.UTF-8",
            "SLURM_TIME_FORMAT": "%s",
        }
        return {**plain, **fixed, **self.env, **dict(command.env)}


class LocalSender(_Local):
    """The blocking sender, for workers and the command line."""

    __slots__ = ()

    def __call__(self, request: Request) -> Reply:
        """Send one request and wait for its reply."""
        if isinstance(request, Look):
            return workdir.look(request)
        if isinstance(request, ReadFile):
            return workdir.read_tail(request)
        with _in_words(request):
            process = subprocess.Popen(self.argv(request), env=self.environment(request), **_PIPES)
        try:
            out, err = process.communicate(_stdin(request), timeout=request.timeout_s)
        except subprocess.TimeoutExpired:
            _kill_group(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):  # it hangs in the kernel, or a child holds its pipes
                process.communicate(timeout=_AFTER_KILL_S)
            raise _no_answer(request) from None
        except BaseException:  # the worker is interrupted: leave no process behind
            _kill_group(process.pid)
            raise
        return _reply(process.returncode, out, err)


class AsyncLocalSender(_Local):
    """The async sender, for the triggerer."""

    __slots__ = ()

    async def __call__(self, request: Request) -> Reply:
        """Send one request and wait for its reply."""
        if isinstance(request, Look):
            return await asyncio.to_thread(workdir.look, request)
        if isinstance(request, ReadFile):
            return await asyncio.to_thread(workdir.read_tail, request)
        with _in_words(request):
            process = await asyncio.create_subprocess_exec(*self.argv(request), env=self.environment(request), **_PIPES)
        try:
            out, err = await asyncio.wait_for(process.communicate(_stdin(request)), request.timeout_s)
        except asyncio.TimeoutError:  # another class than the builtin one before 3.11
            _kill_group(process.pid)
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(process.wait(), _AFTER_KILL_S)
            raise _no_answer(request) from None
        except BaseException:  # the trigger is cancelled: leave no process behind
            _kill_group(process.pid)
            raise
        return _reply(process.returncode or 0, out, err)


def _stdin(command: Command) -> bytes:
    return command.stdin.encode("utf-8", "surrogateescape")


def _reply(code: int, out: bytes, err: bytes) -> Reply:
    return Reply(code, out.decode("utf-8", "replace"), err.decode("utf-8", "replace"))


def _no_answer(command: Command) -> ClusterUnavailableError:
    words = f"{command.argv[0]} gave no answer within {command.timeout_s:.0f} s and was ended"
    return ClusterUnavailableError(words) if command.idempotent else LostReplyError(words)


@contextlib.contextmanager
def _in_words(command: Command) -> Iterator[None]:
    """A process that could not be started has asked nothing."""
    try:
        yield
    except OSError as error:
        raise ClusterUnavailableError(f"{command.argv[0]} cannot be started on this host: {error}") from error


def _kill_group(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
