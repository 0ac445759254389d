"""Checkpoint layouts: which directory is a complete checkpoint, and of which step."""

import os
import re
import stat

from . import files

MANIFEST, MARKS = "profsched.json", ("COMPLETE", "_SUCCESS")
NUMBERED = re.compile(r"(?s)((?:.*[-_.=])?)([0-9]+)\Z")
MARKED = re.compile(r"step[-_]([0-9]+)\Z")


def newest_complete(directory, layout=""):
    """Find the newest complete checkpoint.

    Layouts: `manifest`, a directory with a `profsched.json` that names its files and their sizes and was written last;
    `step`, a directory `step-N` (or `step_N`) with an empty file `COMPLETE` or `_SUCCESS` that was written last.

    Where names differ only in a number of their own at the end (`step-40`, `ckpt_40`, `40`) the number tells which is
    newer, and only the newest are opened: ten thousand are no more work than one. Of other names each is opened.

    Args:
        directory: where checkpoints lie.
        layout: one of the two; empty: either.

    Returns:
        `(path, step)`, or None where there is no complete one.

    Raises:
        OSError: the directory cannot be read; that is not the same as none.
    """
    series = {}  # type: dict
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                match = NUMBERED.match(entry.name)
                name, number = match.groups() if match else (entry.name, 0)
                series.setdefault(name, []).append((int(number), entry.path))
    found = [newest_of(numbered, layout) for numbered in series.values()]
    newest = max((pair for pair in found if pair), default=None)
    return newest[::-1] if newest else None


def newest_of(numbered, layout):
    """Return step and path of the newest complete checkpoint of a series, given as numbers and paths."""
    for _, path in sorted(numbered, reverse=True):
        step = complete_step(path, layout)
        if step is not None:
            return step, path
    return None


def complete_step(path, layout=""):
    """Return the step of the checkpoint in a directory; None where it is not complete."""
    step = manifest_step(path) if layout in ("", "manifest") else None
    if step is None and layout in ("", "step"):
        step = marked_step(path)
    return step


def manifest_step(path):
    """Return the step that a manifest names, if every file it names is there with its size."""
    try:
        body = files.read_json(os.path.join(path, MANIFEST))
    except (OSError, ValueError):
        return None
    step, named = body.get("step"), body.get("files")
    if isinstance(step, bool) or not isinstance(step, int) or step < 0 or not isinstance(named, dict):
        return None
    return step if all(has_file(path, files.native(name), size) for name, size in named.items()) else None


def has_file(directory, name, size):
    """Whether a regular file of that size lies below a directory, on a way without links."""
    parts = name.split("/")
    if "" in parts or ".." in parts:
        return False
    try:
        for depth in range(1, len(parts)):
            if not stat.S_ISDIR(os.lstat(os.path.join(directory, *parts[:depth])).st_mode):
                return False
        info = os.lstat(os.path.join(directory, *parts))
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(info.st_mode) and info.st_size == size


def marked_step(path):
    """Return the step in the name of a `step-N` directory that has its mark."""
    number = MARKED.match(os.path.basename(path))
    if number and any(is_regular(os.path.join(path, mark)) for mark in MARKS):
        return int(number.group(1))
    return None


def is_regular(path):
    """Whether a regular file lies there, and no link to one."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except OSError:
        return False


def view_checkpoints(directory: str, layout: str = "") -> dict:
    """Look for the newest complete checkpoint, as JSON of `Look` tells it.

    Args:
        directory: where checkpoints lie; empty: nowhere.
        layout: as :func:`newest_complete`.

    Returns:
        `visible` False where it cannot be seen, and then `error`; else `path` and `step` (None: there is none).
    """
    view = {"visible": False, "path": "", "step": None, "error": ""}
    if not directory:
        view["error"] = "this task has no checkpoints"
        return view
    try:
        newest = newest_complete(directory, layout)
    except OSError as error:
        view["error"] = "%s: %s" % (directory, error.strerror)
        return view
    view["visible"] = True
    if newest:
        view["path"], view["step"] = newest
    return view
