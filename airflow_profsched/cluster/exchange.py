"""Conversations with a cluster, free of I/O.

A *verb* is a generator: it yields requests, is sent replies, and returns a result. :func:`run` carries one over a
blocking sender (the worker, the command line), :func:`arun` over an async one (the triggerer): nothing is written
twice.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from dataclasses import dataclass, field
from typing import TypeVar

from airflow_profsched.core.errors import ClusterUnavailableError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Command:
    """A program to run where the cluster's commands are.

    Args:
        argv: the argument vector; never a shell string.
        stdin: what it reads.
        idempotent: whether it may be sent again when no answer came.
        timeout_s: how long an answer may take.
        env: variables that are set besides the sender's clean environment.
    """

    argv: tuple[str, ...]
    stdin: str = ""
    idempotent: bool = True
    timeout_s: float = 60.0
    env: tuple[tuple[str, str], ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Look:
    """A look at what an attempt has left in its directories: end markers, newest checkpoint (see `cluster/workdir.py`).

    Args:
        work_dir: the cluster's root; nothing outside is read.
        attempt_dir: the attempt's directory.
        checkpoint_dir: where its checkpoints lie; empty where it has none.
        layout: the checkpoints' layout; empty: detected.
    """

    work_dir: str
    attempt_dir: str
    checkpoint_dir: str = ""
    layout: str = ""


@dataclass(frozen=True, slots=True)
class ReadFile:
    """The end of a regular file below `work_dir`.

    Args:
        work_dir: the cluster's root; nothing outside is read.
        path: the file.
        max_bytes: how much of its end is wanted.
    """

    work_dir: str
    path: str
    max_bytes: int


Request = Command | Look | ReadFile


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer.

    Args:
        code: the command's exit status, or 0; negative: ended by that signal; an errno for files.
        out: its standard output, the file's text, or JSON for a :class:`Look`.
        err: its standard error, or what is wrong with the file.
    """

    code: int
    out: str
    err: str = ""


Exchange = Generator[Request, Reply, T]


def run(exchange: Exchange[T], send: Callable[[Request], Reply]) -> T:
    """Carry a conversation over a blocking sender.

    Args:
        exchange: the verb.
        send: sends one request and waits for its reply.

    Returns:
        What the verb returns.

    Raises:
        ClusterUnavailableError: no answer came, and the verb had no other way.
    """
    try:
        request = next(exchange)
        while True:
            try:
                reply = send(request)
            except ClusterUnavailableError as error:
                request = exchange.throw(error)
            else:
                request = exchange.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result


async def arun(exchange: Exchange[T], send: Callable[[Request], Awaitable[Reply]]) -> T:
    """Carry a conversation over an async sender; otherwise as :func:`run`.

    Args:
        exchange: the verb.
        send: sends one request and waits for its reply.

    Returns:
        What the verb returns.

    Raises:
        ClusterUnavailableError: no answer came, and the verb had no other way.
    """
    try:
        request = next(exchange)
        while True:
            try:
                reply = await send(request)
            except ClusterUnavailableError as error:
                request = exchange.throw(error)
            else:
                request = exchange.send(reply)
    except StopIteration as stop:
        result: T = stop.value
        return result
