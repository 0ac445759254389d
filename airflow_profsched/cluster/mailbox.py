"""The mailbox of a shared directory: notes of the nodes, who waits for what, and what a site said of itself.

A note only says when to look, never what is true.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Collection, Mapping
from pathlib import Path

from airflow_profsched.cluster import workdir
from airflow_profsched.jobside.files import read_regular, write_atomically

_NOTE = re.compile(r"([a-z0-9][a-z0-9-]{0,70})\.(start|notice|end)")
_MOST_NOTES = 200_000


def list_mailbox(work_dir: str) -> dict[str, set[str]]:
    """List the notes that nodes have left.

    Args:
        work_dir: the cluster's root.

    Returns:
        The events by job key. What is no note is passed over, and so is everything where there is no mailbox.
    """
    notes: dict[str, set[str]] = {}
    try:
        with os.scandir(f"{work_dir}/mailbox") as entries:
            for number, entry in enumerate(entries):
                if number >= _MOST_NOTES:
                    break
                match = _NOTE.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    notes.setdefault(match.group(1), set()).add(match.group(2))
    except OSError:
        return {}
    return notes


def clear_notes(work_dir: str, notes: Mapping[str, Collection[str]]) -> None:
    """Remove notes that have been acted upon.

    Args:
        work_dir: the cluster's root.
        notes: the events by job key.
    """
    for key, events in notes.items():
        for event in events:
            with contextlib.suppress(OSError):  # it is gone, or stays and costs a question: nobody fails by a note
                Path(work_dir, "mailbox", f"{key}.{event}").unlink()


def write_watch_file(work_dir: str, names: Collection[str]) -> None:
    """Say which jobs this process waits for: a live job that nobody names is an orphan.

    Args:
        work_dir: the cluster's root.
        names: the jobs' names.
    """
    place = f"{work_dir}/mailbox/watch/{socket.gethostname()}-{os.getpid()}"
    try:
        Path(place).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(place, json.dumps(sorted(names)))
    except OSError:
        return  # it serves `profsched orphans` alone, which also asks Airflow


def watched_names(work_dir: str, now_s: float, within_s: float) -> set[str]:
    """Return the jobs that some process has said it waits for.

    Args:
        work_dir: the cluster's root.
        now_s: epoch seconds.
        within_s: how old what it said may be.

    Returns:
        The jobs' names.
    """
    names: set[str] = set()
    for place in Path(work_dir, "mailbox", "watch").glob("*-*"):
        try:
            if now_s - place.stat().st_mtime <= within_s:
                said = json.loads(read_regular(str(place)))
                names.update(name for name in said if isinstance(said, list) and isinstance(name, str))
        except (OSError, ValueError, TypeError, RecursionError):
            continue
    return names


def keep(work_dir: str, name: str, text: str) -> None:
    """Keep a text for every process that works with this directory.

    Args:
        work_dir: the cluster's root.
        name: the file's name.
        text: what is kept.

    Raises:
        WorkDirError: it cannot be written.
    """
    place = Path(work_dir, "mailbox", name)
    with workdir.in_words("writing", str(place)):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(str(place), text)


def read_kept(work_dir: str, name: str, within_s: float, now_s: float) -> str | None:
    """Return what :func:`keep` kept.

    Args:
        work_dir: the cluster's root.
        name: the file's name.
        within_s: how old it may be.
        now_s: epoch seconds.

    Returns:
        The text; None where there is none, or only an older one.
    """
    place = Path(work_dir, "mailbox", name)
    try:
        if now_s - place.stat().st_mtime > within_s:
            return None
        return str(read_regular(str(place)), "utf-8")
    except (OSError, ValueError):
        return None
