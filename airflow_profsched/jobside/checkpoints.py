"""Checkpoint layouts: which directory is a complete checkpoint, and of which step."""

import os
import re
import stat

from . import files

MANIFEST, MARKS = "profsched.json", ("COMPLETE", "_SUCCESS")


def newest_complete(directory, layout=""):
    """Find the newest complete checkpoint.

    Layouts: `manifest`, a directory with a `profsched.json` that names its files and their sizes and was written last;
    `step`, a directory `step-N` (or `step_N`) with an empty file `COMPLETE` or `_SUCCESS` that was written last.

    Args:
        directory: where checkpoints lie.
        layout: one of the two; empty: either.

    Returns:
        `(path, step)`, or None where there is no complete one.

    Raises:
        OSError: the directory cannot be read; that is not the same as none.
    """
    numbered, others = [], []
    for entry in os.scandir(directory):
        if not entry.is_dir(follow_symlinks=False):
            continue
        number = re.search(r"(\d+)$", entry.name)
        if number:
            numbered.append((int(number.group(1)), entry.path))
        else:
            others.append(entry.path)
    for _, path in sorted(numbered, reverse=True):
        step = complete_step(path, layout)
        if step is not None:
            return path, step
    found = [(complete_step(path, layout), path) for path in others]
    found = [(step, path) for step, path in found if step is not None]
    return (max(found)[1], max(found)[0]) if found else None


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
    return step if all(has_file(path, name, size) for name, size in named.items()) else None


def has_file(directory, name, size):
    """Whether a regular file of that size lies below a directory."""
    if name.startswith("/") or ".." in name.split("/"):
        return False
    try:
        info = os.lstat(os.path.join(directory, name))
    except (OSError, ValueError):
        return False
    return stat.S_ISREG(info.st_mode) and info.st_size == size


def marked_step(path):
    """Return the step in the name of a `step-N` directory that has its mark."""
    number = re.match(r"step[-_](\d+)$", os.path.basename(path))
    if number and any(os.path.isfile(os.path.join(path, mark)) for mark in MARKS):
        return int(number.group(1))
    return None


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
