"""Signals and processes: what may reach this one, and what lives below it."""

import ctypes
import os
import select
import signal
import time

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


def living():
    """Yield every living process that can be seen, as pid, parent's pid and group."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open("/proc/%s/stat" % name, "rb") as source:
                    state, parent, group = source.read().rpartition(b")")[2].split()[:3]
            except (OSError, ValueError):
                continue  # it ended while we looked
            if state not in (b"Z", b"X"):
                yield int(name), int(parent), int(group)


def descendants(root):
    """Return the pids of all living processes below one, also those in sessions of their own."""
    children = {}  # type: dict
    for pid, parent, _ in living():
        children.setdefault(parent, []).append(pid)
    found, todo = [], [root]
    while todo:
        below = children.get(todo.pop(), [])
        found.extend(below)
        todo.extend(below)
    return found


def members(group):
    """Return the pids of all living processes of a group."""
    return [pid for pid, _, its in living() if its == group]


def send(pids, number):
    """Send a signal to processes, some of which may be gone."""
    for pid in pids:
        try:
            os.kill(pid, number)
        except OSError:
            pass


def send_group(group, number):
    """Send a signal to a group that may be gone."""
    try:
        os.killpg(group, number)
    except OSError:
        pass


def adopt_orphans():
    """Become the parent of every process whose own parent ends below us, so that none escapes (Linux 3.4)."""
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    except (OSError, AttributeError):
        pass


class Signals:
    """Notes the first stop notice, and wakes the waiting loop at every signal."""

    def __init__(self):
        self.notice_s = None
        self.number = None
        self.settled = False
        self.passing = []  # type: list  # signals that are the program's own affair
        self.reader, writer = os.pipe()
        for handle in (self.reader, writer):
            os.set_blocking(handle, False)
        signal.set_wakeup_fd(writer)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self.stop)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, lambda got, frame: self.passing.append(got))

    def also(self, number):
        """Take another signal for a stop notice: the one that the policy asks the cluster for."""
        signal.signal(number, self.stop)

    def stop(self, number, frame):
        """Handle a stop signal: the first one counts, repeats say nothing new."""
        if self.notice_s is None and not self.settled:
            self.notice_s, self.number = time.time(), number

    def settle(self, seconds):
        """Wait a moment for a notice that is on its way; what comes later is none, for the program has ended before."""
        until = time.time() + seconds
        while self.notice_s is None and time.time() < until:
            self.wait(until - time.time())
        self.settled = True

    def wait(self, seconds):
        """Wait for a signal, or for the time to pass."""
        try:
            if select.select([self.reader], [], [], max(0.0, seconds))[0]:
                os.read(self.reader, 4096)
        except OSError:
            pass
