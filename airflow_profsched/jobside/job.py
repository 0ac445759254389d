"""One rank of one attempt: the program's start, its stop notice, and the end marker."""

import errno
import json
import os
import signal
import socket
import subprocess
import time

from . import checkpoints, environment, files, processes

SAVED = 85  # exit code: saved, run me again (HTCondor's convention)
REFUSED = 78  # EX_CONFIG of sysexits.h
RESULT_BYTES = 16 << 20
MARGIN_S = 2.0  # before a hard end by the cluster, so that the marker is still written
LEFTOVERS_S = 2.0
KILL_S = 5.0
STRAY_SIGNAL_S = 0.3
TICK_S = 1.0
RANKS_TICK_S = 0.2


class Job:
    """One rank of one attempt, from its start to its end marker."""

    def __init__(self, spec, signals):
        self.spec, self.signals = spec, signals
        env = os.environ
        self.rank = int(env.get("SLURM_PROCID", "0"))
        self.node_rank = int(env.get("SLURM_NODEID", "0"))
        self.job_id = env.get("SLURM_JOB_ID", "")
        self.restart = int(env.get("SLURM_RESTART_COUNT", "0") or 0) if self.job_id else self.count_start()
        self.stop_signal = signal.Signals["SIG" + spec["stop_signal"]]
        self.started_s = self.beat_s = self.owner_s = time.time()
        self.program = None
        self.status = None
        self.forwarded = self.killed = self.fenced = False
        self.start_step = None
        self.resume_from = ""

    def path(self, name):
        """Return the path of a file in the attempt's directory."""
        return os.path.join(self.spec["attempt_dir"], name)

    def say(self, words):
        """Tell people, in the job's log."""
        files.tell("rank %d: %s" % (self.rank, words))

    def note(self, event):
        """Drop a note into the mailbox: an empty file that says where to look, never what is true."""
        self.touch(os.path.join(self.spec["mailbox_dir"], "%s.%s" % (self.spec["key"], event)))

    def touch(self, path):
        """Make an empty file, or renew its time; a mailbox that cannot be written costs time, no more."""
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600))
            os.utime(path, None)
        except OSError:
            pass

    def count_start(self):
        """Count the starts in place where the cluster does not; return how many came before this one."""
        place = self.path("rank-%d.starts" % self.rank)
        try:
            before = files.read_json(place)["starts"]
        except (OSError, ValueError, KeyError):
            before = 0
        try:
            files.write_atomically(place, json.dumps({"starts": before + 1}))
        except (OSError, TypeError):
            return 0
        return before

    # -------------------------------------------------------------------------------------------- owner

    def owner_attempt(self):
        """Return the attempt that the owner file names: a higher one than ours means that we are the past."""
        try:
            owner = files.read_json(os.path.join(self.spec["task_dir"], "owner"))
            return owner["attempt"] if files.native(owner["task"]) == self.spec["task"] else None
        except (OSError, ValueError, KeyError):
            return self.spec["attempt"]

    def admitted(self):
        """Whether the directory is ours: another task's is refused, so is a later attempt's."""
        attempt = self.owner_attempt()
        if attempt is None:
            self.say("%s belongs to another task: refused" % self.spec["task_dir"])
            return False
        self.fenced = isinstance(attempt, int) and attempt > self.spec["attempt"]
        if self.fenced:
            self.say("attempt %s has taken over: this one does not start" % attempt)
        return not self.fenced

    # -------------------------------------------------------------------------------------------- run

    def run(self):
        """Run the program to its end.

        Returns:
            The exit code of this rank.
        """
        if not self.rank:
            self.note("start")
            self.heartbeat()
        if not self.admitted():
            return self.finish(SAVED if self.fenced else REFUSED)
        self.wait_for_fence()
        self.look_back()
        try:
            env = environment.build(self)
        except (OSError, ValueError) as error:
            self.say("the task's variables cannot be read, so the program is not started: %s" % error)
            # Where a start before this one has deleted them, a new attempt brings them again.
            return self.finish(SAVED if self.restart else REFUSED)
        if self.signals.notice_s is None:
            self.start(env)
            self.watch()
        return self.finish(SAVED if self.program is None and self.status is None else exit_code(self.status))

    def wait_for_fence(self):
        """After a lost node: wait until processes of the attempt before must have read the owner file and ended."""
        until = time.time() + self.spec.get("fence_s", 0)
        while time.time() < until and self.signals.notice_s is None:
            self.signals.wait(until - time.time())

    def look_back(self):
        """See where the program can go on, and clear away what an earlier start in place has left."""
        view = checkpoints.view_checkpoints(self.spec["checkpoint_dir"], self.spec["layout"])
        self.resume_from, self.start_step = view["path"], view["step"]
        if self.spec["checkpoint_dir"] and not view["visible"]:
            self.say("the checkpoints cannot be seen: %s" % view["error"])
        if not self.rank:
            files.remove(self.path("result.json"))
        files.remove(self.path("rank-%d.end" % self.rank))

    def start(self, env):
        """Start the program in a session of its own."""
        try:
            self.program = subprocess.Popen(
                [os.fsencode(word) for word in self.spec["argv"]],
                env=env,
                cwd=self.spec.get("cwd") or self.spec["task_dir"],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                restore_signals=True,
            )
        except (OSError, ValueError) as error:
            self.say("the program cannot be started: %s" % error)
            missing = isinstance(error, OSError) and error.errno in (errno.ENOENT, errno.ENOTDIR)
            self.status = (127 if missing else 126) << 8

    def watch(self):
        """Wait for the program's end, and see to it that nothing of it stays."""
        self.attend(lambda: self.status is None)
        if self.status or not self.has_result():
            self.signals.settle(STRAY_SIGNAL_S)  # the same signal may have ended the program before it reached us
        self.signals.settled = True
        self.attend(self.group_saves)
        self.end_leftovers()

    def attend(self, holds):
        """Forward the first stop notice, end everything when the grace time is over, and show that we live.

        Args:
            holds: says whether there is still something to wait for.
        """
        while holds():
            self.forward()
            self.pass_on()
            now = time.time()
            if now >= self.grace_end():
                self.end_all("its grace time is over")
            if now - self.beat_s >= self.spec["heartbeat_s"]:
                self.beat_s = now
                self.heartbeat()
            if now - self.owner_s >= self.spec["owner_poll_s"]:
                self.owner_s = now
                self.look_at_owner()
            self.signals.wait(min(TICK_S, self.grace_end() - time.time()))
            self.reap()

    def group_saves(self):
        """Whether the program left the notice to others: a shell dies of it at once, while its python is still saving."""
        if self.program is None or self.killed or self.signals.notice_s is None:
            return False
        if exit_code(self.status) not in (128 + signal.SIGTERM, 128 + self.stop_signal):
            return False
        return bool(processes.members(self.program.pid))

    def forward(self):
        """Pass the first stop notice on to the program's group."""
        if self.forwarded or self.signals.notice_s is None:
            return
        self.forwarded = True
        processes.send_group(self.program.pid, self.stop_signal)
        self.note("notice")
        left = self.grace_end() - time.time()
        self.say("asked to stop by signal %d: the program has %.0f s to save" % (self.signals.number, left))

    def pass_on(self):
        """Pass signals on that are the program's own affair."""
        while self.signals.passing:
            number = self.signals.passing.pop(0)
            if self.status is None:
                processes.send([self.program.pid], number)

    def grace_end(self):
        """Return when the program has to be gone; infinity before a notice."""
        notice_s = self.signals.notice_s
        if notice_s is None:
            return float("inf")
        end = notice_s + self.spec["grace_s"]
        limit = os.environ.get("SLURM_JOB_END_TIME", "")
        hard = float(limit) if limit.isdigit() else self.started_s + self.spec["walltime_s"]
        if hard <= notice_s:  # the limit was extended, or this is its own notice: the kill comes later
            return end
        # A notice shortly before the walltime limit: the limit is the end, and comes as a kill.
        return max(notice_s + 1, min(end, hard - MARGIN_S))

    def reap(self):
        """Collect every child that has ended, adopted ones as well."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except OSError:
                return
            if not pid:
                return
            if self.program is not None and pid == self.program.pid:
                self.status = status
                self.program.returncode = 0  # Popen must not wait for it as well

    def end_all(self, why):
        """End the program and every process below us: nothing may keep the job's resources beyond its time."""
        self.killed = True
        self.kill_below()
        self.say("%s: the program is ended" % why)
        if self.status is None:
            self.status = signal.SIGKILL

    def kill_below(self):
        """Kill every process below us, until there is none; what hangs in the kernel is left to the cluster."""
        until = time.time() + KILL_S
        while time.time() < until:
            below = processes.descendants(os.getpid())
            if not below:
                return
            processes.send(below, signal.SIGKILL)
            self.signals.wait(0.05)
            self.reap()

    def end_leftovers(self):
        """A process that outlives the program would hold the step: ask it, then end it."""
        self.reap()
        processes.send(processes.descendants(os.getpid()), signal.SIGTERM)
        until = time.time() + LEFTOVERS_S
        while processes.descendants(os.getpid()) and time.time() < until:
            self.signals.wait(0.05)
            self.reap()
        self.kill_below()

    def heartbeat(self):
        """Show that rank 0 lives."""
        if not self.rank:
            self.touch(os.path.join(self.spec["mailbox_dir"], "heartbeats", self.spec["key"]))

    def look_at_owner(self):
        """End the program when a later attempt has taken over: two must never write the same checkpoints."""
        attempt = self.owner_attempt()
        if isinstance(attempt, int) and attempt > self.spec["attempt"]:
            self.fenced = True
            self.end_all("attempt %d has taken over" % attempt)

    # -------------------------------------------------------------------------------------------- the end

    def finish(self, code):
        """Write the end marker, wait for the other ranks' where a notice came, and say how it ended.

        Args:
            code: the program's exit code.

        Returns:
            This rank's own exit code.
        """
        self.signals.settled = True
        fault = "" if self.rank else self.result_fault()
        if fault:
            self.say("the result is none: %s" % fault)
        done = self.is_done(code)
        self.mark(code, done)
        self.note("end")
        if self.signals.notice_s is not None and self.spec["ranks"] > 1:
            self.wait_for_ranks()
            if not done and self.is_done(code):  # rank 0 may have declared it meanwhile
                done = True
                self.mark(code, done)
        if self.spec["ranks"] == 1 or self.all_ended():  # another rank may have to read them yet
            files.remove(self.path("env.sh"))
        return self.leaves_by(code, done)

    def leaves_by(self, code, done):
        """Return the exit code of this rank: a program that saved and left by 0 is to be run again."""
        return SAVED if self.signals.notice_s is not None and not code and not done else code

    def is_done(self, code):
        """Whether the run is finished: exit 0, and after a notice only with a result that declares it."""
        if code or self.fenced or self.program is None:
            return False
        return self.signals.notice_s is None or self.has_result()

    def has_result(self):
        """Whether the program has written a result of JSON."""
        return self.result_fault() is None

    def result_fault(self):
        """Return why the program's result is none: empty where it wrote none, None where there is nothing to say."""
        try:
            json.loads(files.read_regular(self.path("result.json"), RESULT_BYTES).decode("utf-8"))
        except FileNotFoundError:
            return ""
        except (OSError, ValueError, RecursionError) as error:
            return str(error)
        return None

    def mark(self, code, done):
        """Write this rank's end marker: a temporary name, fsync, rename."""
        view = checkpoints.view_checkpoints(self.spec["checkpoint_dir"], self.spec["layout"])
        ended_by = os.WTERMSIG(self.status) if self.status is not None and os.WIFSIGNALED(self.status) else None
        ran = self.program is not None or self.status is not None
        body = {
            "version": 1,
            "key": self.spec["key"],
            "job_id": self.job_id,
            "restart": self.restart,
            "nonce": self.spec["nonce"],
            "rank": self.rank,
            "ranks": self.spec["ranks"],
            "host": socket.gethostname(),
            "exit_code": self.leaves_by(code, done),
            "program_exit": code if ran and ended_by is None else None,
            "signal": ended_by,
            "started_s": self.started_s,
            "ended_s": time.time(),
            "notice_s": self.signals.notice_s,
            "notice_signal": self.signals.number,
            "killed": self.killed,
            "fenced": self.fenced,
            "done": done,
            "result": self.has_result(),
            "start_step": self.start_step,
            "step": view["step"],
            "checkpoint": files.readable(view["path"]),
        }
        for pause in (0.2, 1.0, 0.0):  # a full or stale file system may come back
            try:
                files.write_atomically(self.path("rank-%d.end" % self.rank), json.dumps(body))
            except OSError as error:
                self.say("the end marker cannot be written: %s" % error)
                time.sleep(pause)
            else:
                return

    def wait_for_ranks(self):
        """No rank cuts another short: srun would end the others soon after the first that leaves."""
        while time.time() < self.grace_end() and not self.all_ended():
            time.sleep(RANKS_TICK_S)

    def all_ended(self):
        """Whether every rank of this very start has written its end marker."""
        try:
            os.listdir(self.spec["attempt_dir"])  # or NFS believes for a minute that what was not there still is not
        except OSError:
            return False
        return all(self.ended(rank) for rank in range(self.spec["ranks"]))

    def ended(self, rank):
        """Whether a rank of this very start has written its end marker."""
        try:
            marker = files.read_json(self.path("rank-%d.end" % rank))
        except (OSError, ValueError):
            return False
        return marker.get("nonce") == self.spec["nonce"] and marker.get("restart") == self.restart


def exit_code(status):
    """Return the exit code that a shell would show for a wait status."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def run(spec_path):
    """Run the job of a spec.json.

    Args:
        spec_path: the file.

    Returns:
        The exit code.
    """
    signals = processes.Signals()  # first of all: a notice may come while we start
    try:
        job = Job(files.native(files.patiently(files.read_json, spec_path)), signals)
    except (OSError, ValueError, KeyError) as error:
        files.tell("%s cannot be read, so nothing is started: %r" % (spec_path, error))
        return REFUSED
    signals.also(job.stop_signal)
    processes.adopt_orphans()
    return job.run()
