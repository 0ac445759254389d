"""One rank of one attempt: the program's start, its stop notice, and the end marker."""

import errno
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time

from . import checkpoints, files, processes

SAVED = 85  # exit code: saved, run me again (HTCondor's convention)
REFUSED = 78  # EX_CONFIG of sysexits.h
RESULT_BYTES = 16 << 20
MARGIN_S = 2.0  # before a hard end by the cluster, so that the marker is still written
LEFTOVERS_S = 2.0
STRAY_SIGNAL_S = 0.3
RANKS_TICK_S = 0.2


class Job:
    """One rank of one attempt, from its start to its end marker."""

    def __init__(self, spec, signals):
        self.spec, self.signals = spec, signals
        env = os.environ
        self.rank = int(env.get("SLURM_PROCID", "0"))
        self.node_rank = int(env.get("SLURM_NODEID", "0"))
        self.job_id = env.get("SLURM_JOB_ID", "")
        self.restart = int(env.get("SLURM_RESTART_COUNT", "0") or 0)
        self.started_s = time.time()
        self.program = None
        self.status = None
        self.killed = self.fenced = False
        self.start_step = None
        self.resume_from = ""

    def path(self, name):
        """Return the path of a file in the attempt's directory."""
        return os.path.join(self.spec["attempt_dir"], name)

    def say(self, words):
        """Tell people, in the job's log."""
        sys.stderr.write("profsched (rank %d): %s\n" % (self.rank, words))
        sys.stderr.flush()

    def note(self, event):
        """Drop a note into the mailbox: an empty file that says where to look, never what is true."""
        self.touch(os.path.join(self.spec["mailbox_dir"], "%s.%s" % (self.spec["key"], event)))

    def touch(self, path):
        """Make an empty file, or renew its time; a mailbox that cannot be written costs time, no more."""
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
            os.utime(path, None)
        except OSError:
            pass

    # -------------------------------------------------------------------------------------------- environment

    def environment(self):
        """Build what the program sees: the job's environment, the author's variables, and the contract's."""
        env = dict(os.environb)
        env.update(self.own_variables())
        contract = self.contract()
        contract.update(self.rendezvous())
        env.update({os.fsencode(name): os.fsencode(str(value)) for name, value in contract.items()})
        return env

    def own_variables(self):
        """Read env.sh, byte for byte: a file for its owner alone, deleted at the end."""
        try:
            text = os.fsdecode(files.read_regular(self.path("env.sh"), 64 << 20))
        except OSError as error:
            self.say("the variables of the task cannot be read: %s" % error)
            return {}
        words = [word for word in shlex.split(text) if word != "export"]
        return dict(os.fsencode(word).partition(b"=")[::2] for word in words)

    def contract(self):
        """Return the variables that every program may rely on."""
        spec = self.spec
        interval = spec.get("checkpoint_interval_s")
        variables = {
            "PROFSCHED_PROFILE": spec["profile"],
            "PROFSCHED_JOB_KEY": spec["key"],
            "PROFSCHED_CLUSTER": spec["cluster"],
            "PROFSCHED_ATTEMPT": spec["attempt"] + self.restart,
            "PROFSCHED_CHECKPOINT_DIR": spec["checkpoint_dir"],
            "PROFSCHED_RESUME_FROM": self.resume_from,
            "PROFSCHED_RESUME_STEP": "" if self.start_step is None else self.start_step,
            "PROFSCHED_NOTICE_S": "%g" % spec["grace_s"],
            "PROFSCHED_CHECKPOINT_INTERVAL_S": "" if interval is None else "%g" % interval,
            "PROFSCHED_RESULT": self.path("result.json"),
        }
        if spec.get("traceparent"):
            variables["TRACEPARENT"] = spec["traceparent"]
        return variables

    def rendezvous(self):
        """Return where the ranks meet, computed anew at each start: a resumed job runs on other hosts."""
        nodes, tasks = self.spec["nodes"], self.spec["tasks_per_node"]
        if nodes * tasks == 1:
            return {}
        host = master_host()
        port = 20000 + (int(self.job_id or 0) * 31 + self.spec["attempt"] + self.restart) % 10000
        meet = {"MASTER_ADDR": host, "MASTER_PORT": port, "NODE_RANK": self.node_rank, "NNODES": nodes}
        if nodes > 1:
            meet.update({"PET_MASTER_ADDR": host, "PET_MASTER_PORT": port, "PET_NODE_RANK": self.node_rank})
            meet.update({"PET_NNODES": nodes, "PET_NPROC_PER_NODE": self.spec["gpus_per_node"] or 1})
        if tasks > 1:
            local = int(os.environ.get("SLURM_LOCALID", "0"))
            meet.update({"WORLD_SIZE": nodes * tasks, "RANK": self.rank, "LOCAL_RANK": local})
        return meet

    # -------------------------------------------------------------------------------------------- owner

    def owner_attempt(self):
        """Return the attempt that the owner file names: a higher one than ours means that we are the past."""
        try:
            owner = files.read_json(os.path.join(self.spec["task_dir"], "owner"))
            return owner["attempt"] if owner["task"] == self.spec["task"] else None
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
        view = checkpoints.view_checkpoints(self.spec["checkpoint_dir"], self.spec["layout"])
        self.resume_from, self.start_step = view["path"], view["step"]
        if self.spec["checkpoint_dir"] and not view["visible"]:
            self.say("the checkpoints cannot be seen: %s" % view["error"])
        if not self.rank:
            files.remove(self.path("result.json"))
        files.remove(self.path("rank-%d.end" % self.rank))
        if self.signals.notice_s is None:
            self.start()
            self.watch()
        return self.finish(SAVED if self.program is None and self.status is None else exit_code(self.status))

    def wait_for_fence(self):
        """After a lost node: wait until processes of the attempt before must have read the owner file and ended."""
        until = time.time() + self.spec.get("fence_s", 0)
        while time.time() < until and self.signals.notice_s is None:
            self.signals.wait(until - time.time())

    def start(self):
        """Start the program in a session of its own."""
        env = self.environment()
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
        """Wait for the program's end; forward the first stop notice; end everything when the grace time is over."""
        forwarded = False
        beat_s = owner_s = time.time()
        while self.program is not None and self.status is None:
            now = time.time()
            if self.signals.notice_s is not None and not forwarded:
                forwarded = True
                self.forward()
            self.pass_on()
            if now >= self.grace_end():
                self.end_all("its grace time is over")
            if now - beat_s >= self.spec["heartbeat_s"]:
                beat_s = now
                self.heartbeat()
            if now - owner_s >= self.spec["owner_poll_s"]:
                owner_s = now
                self.look_at_owner()
            self.signals.wait(min(1.0, self.grace_end() - now))
            self.reap()
        if self.status and self.signals.notice_s is None:
            self.signals.wait(STRAY_SIGNAL_S)  # the same signal may have ended the program before it reached us
        self.end_leftovers()

    def forward(self):
        """Pass the stop notice on to the program's group."""
        self.note("notice")
        number = getattr(signal, "SIG" + self.spec["stop_signal"])
        left = self.grace_end() - time.time()
        self.say("asked to stop by signal %d: the program has %.0f s to save" % (self.signals.number, left))
        try:
            os.killpg(self.program.pid, number)
        except OSError:
            pass

    def pass_on(self):
        """Pass signals on that are the program's own affair."""
        while self.signals.passing:
            processes.send([self.program.pid], self.signals.passing.pop(0))

    def grace_end(self):
        """Return when the program has to be gone; infinity before a notice."""
        if self.signals.notice_s is None:
            return float("inf")
        end = self.signals.notice_s + self.spec["grace_s"]
        limit = os.environ.get("SLURM_JOB_END_TIME", "")
        hard = float(limit) if limit.isdigit() else self.started_s + self.spec["walltime_s"]
        # A notice shortly before the walltime limit: the limit is the end, and comes as a kill.
        return max(self.signals.notice_s + 1, min(end, hard - MARGIN_S))

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
        """Kill every process below us: nothing may keep the job's resources beyond its time."""
        self.killed = True
        self.say("%s: the program is ended" % why)
        until = time.time() + 5
        while time.time() < until:
            below = processes.descendants(os.getpid())
            if not below:
                break
            processes.send(below, signal.SIGKILL)
            self.signals.wait(0.05)
            self.reap()
        if self.status is None:
            self.status = signal.SIGKILL

    def end_leftovers(self):
        """A process that outlives the program would hold the step: ask it, then end it."""
        until = time.time() + LEFTOVERS_S
        asked = False
        self.reap()
        while processes.descendants(os.getpid()):
            below = processes.descendants(os.getpid())
            processes.send(below, signal.SIGTERM if not asked else 0)
            asked = True
            if time.time() >= until:
                processes.send(below, signal.SIGKILL)
            self.signals.wait(0.05)
            self.reap()

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
        noticed = self.signals.notice_s is not None
        done = self.is_done(code)
        self.mark(code, done)
        self.note("end")
        if noticed and self.spec["ranks"] > 1:
            self.wait_for_ranks()
            if not done and self.is_done(code):  # rank 0 may have declared it meanwhile
                done = True
                self.mark(code, done)
        if not self.rank:
            files.remove(self.path("env.sh"))
        return SAVED if noticed and not code and not done else code

    def is_done(self, code):
        """Whether the run is finished: exit 0, and after a notice only with a result that declares it."""
        if code or self.fenced or self.program is None:
            return False
        return self.signals.notice_s is None or self.has_result()

    def has_result(self):
        """Whether the program has written a result of JSON."""
        try:
            json.loads(files.read_regular(self.path("result.json"), RESULT_BYTES).decode("utf-8"))
        except (OSError, ValueError, RecursionError):
            return False
        return True

    def mark(self, code, done):
        """Write this rank's end marker: a temporary name, fsync, rename."""
        noticed = self.signals.notice_s is not None
        view = checkpoints.view_checkpoints(self.spec["checkpoint_dir"], self.spec["layout"])
        ended_by = os.WTERMSIG(self.status) if self.status is not None and os.WIFSIGNALED(self.status) else None
        body = {
            "version": 1,
            "key": self.spec["key"],
            "job_id": self.job_id,
            "restart": self.restart,
            "nonce": self.spec["nonce"],
            "rank": self.rank,
            "ranks": self.spec["ranks"],
            "host": socket.gethostname(),
            "exit_code": SAVED if noticed and not code and not done else code,
            "program_exit": code if ended_by is None else None,
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
            "checkpoint": view["path"],
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
        while time.time() < self.grace_end() and not all(self.ended(rank) for rank in range(self.spec["ranks"])):
            time.sleep(RANKS_TICK_S)

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


def master_host():
    """Return the host of rank 0: the first of the job's nodes where its name resolves, else the address srun came from."""
    nodes = os.environ.get("SLURM_JOB_NODELIST", "")
    try:
        named = subprocess.check_output(["scontrol", "show", "hostnames", nodes], stderr=subprocess.DEVNULL)
        first = named.decode("utf-8", "replace").split()[0]
        socket.getaddrinfo(first, None)
    except (OSError, IndexError, UnicodeError, subprocess.CalledProcessError):
        return os.environ.get("SLURM_LAUNCH_NODE_IPADDR") or "127.0.0.1"
    return first


def run(spec_path):
    """Run the job of a spec.json.

    Args:
        spec_path: the file.

    Returns:
        The exit code.
    """
    signals = processes.Signals()  # first of all: a notice may come while we start
    spec = files.read_json(spec_path)
    if spec["stop_signal"] != "TERM":
        signals.also(getattr(signal, "SIG" + spec["stop_signal"]))
    processes.adopt_orphans()
    return Job(spec, signals).run()
