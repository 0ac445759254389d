"""Reading and writing next to programs that may leave anything behind."""

import errno
import json
import os
import stat

MOST_BYTES = 1 << 20


def read_regular(path, most=MOST_BYTES):
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


def read_json(path, most=MOST_BYTES):
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
    with os.fdopen(handle, "w") as out:
        out.write(text)
        out.flush()
        os.fsync(out.fileno())
    os.rename(partial, path)
