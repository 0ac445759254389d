"""Reading and writing next to programs that may leave anything behind."""

import errno
import json
import os
import select
import stat
import time

MOST_BYTES = 1 << 20
PAUSES_S = (0.5, 2.0)


def tell(words):
    """Say something in the job's log; nothing depends on anybody reading it, or on room on the disk.

    Args:
        words: a line.
    """
    try:
        if select.select([], [2], [], 0)[1]:  # else who reads it has stopped, and we must not
            os.write(2, ("profsched: %s\n" % words).encode("utf-8", "surrogateescape"))
    except (OSError, ValueError):
        pass


def patiently(read, *arguments):
    """Read what another host has just written: a shared file system may show it late.

    Args:
        read: the function.
        arguments: its arguments.

    Returns:
        What it returns.

    Raises:
        OSError: it still cannot be read.
    """
    for pause in PAUSES_S:
        try:
            return read(*arguments)
        except OSError:
            time.sleep(pause)
    return read(*arguments)


def native(value):
    """Spell the texts of a JSON value as this interpreter spells file names.

    Python 3.6 takes ASCII for the file system's encoding where the locale is C, which is what jobs often have.

    Args:
        value: what JSON can hold.

    Returns:
        The same; `os.fsencode` gives every text's UTF-8.
    """
    if isinstance(value, str):
        return os.fsdecode(value.encode("utf-8", "surrogateescape"))
    if isinstance(value, list):
        return [native(item) for item in value]
    if isinstance(value, dict):
        return {native(name): native(item) for name, item in value.items()}
    return value


def readable(text):
    """Spell a file name as people and JSON do; bytes that are no UTF-8 stay surrogates."""
    return os.fsencode(text).decode("utf-8", "surrogateescape")


def read_regular(path: str, most: int = MOST_BYTES) -> bytes:
    """Read a regular file, without following a link and without waiting for a FIFO.

    Args:
        path: the file.
        most: bytes; a larger file is an error.

    Returns:
        Its bytes.

    Raises:
        OSError: there is none, or it is something else.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        info = os.fstat(handle)
        if not stat.S_ISREG(info.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if info.st_size > most:
            raise OSError(errno.EFBIG, "larger than %d bytes" % most, path)
        with os.fdopen(os.dup(handle), "rb") as source:
            return source.read(most)
    finally:
        os.close(handle)


def read_json(path: str, most: int = MOST_BYTES) -> dict:
    """Read a JSON object from a regular file.

    Args:
        path: the file.
        most: bytes; a larger file is an error.

    Returns:
        The dictionary.

    Raises:
        OSError: there is none.
        ValueError: it holds no JSON object.
    """
    try:
        body = json.loads(read_regular(path, most).decode("utf-8"))
    except RecursionError:
        raise ValueError("%s is nested too deeply" % path) from None
    if not isinstance(body, dict):
        raise ValueError("%s holds no JSON object" % path)
    return body


def remove(path):
    """Remove a file that may not be there."""
    try:
        os.unlink(path)
    except OSError:
        pass


def write_atomically(path: str, text: str) -> None:
    """Write a file so that others see all of it or nothing."""
    partial = "%s.%d.tmp" % (path, os.getpid())
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(handle, "w") as out:
            out.write(text)
            out.flush()
            os.fsync(out.fileno())
        os.rename(partial, path)
    except OSError:
        remove(partial)
        raise
