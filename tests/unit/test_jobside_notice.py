"""Stop notices in the situations that are not the plain one: wrappers, other signals, repeats, and time that runs short."""

from __future__ import annotations

import os
import signal
import sys
import time

import pytest

from tests.unit.node import KEY, Node, alive, group, one, until

WAIT = "import time\nopen('ready', 'w').close()\ntime.sleep(60)\n"

LATE_SAVER = """
import os, signal, sys, time
asked = []
for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, lambda got, frame: asked.append(got))
open("ready", "w").close()
while not asked:
    time.sleep(0.05)
time.sleep({seconds})
place = os.path.join(os.environ["PROFSCHED_CHECKPOINT_DIR"], "step-5")
os.makedirs(place)
open(os.path.join(place, "COMPLETE"), "w").close()
open("got", "w").write(" ".join(map(str, asked)))
sys.exit({code})
"""


def by_shell(code, shell="/bin/sh"):
    """A script that starts the program and goes on afterwards, so that the shell stays its parent."""
    return [shell, "-c", '"$0" -c "$1"; echo over', sys.executable, code]


def grace_of(marker):
    return marker["ended_s"] - marker["notice_s"]


@pytest.mark.parametrize("send", [one, group])
def test_a_program_below_a_shell_that_dies_of_the_notice_may_still_save(tmp_path, send):
    node = Node(tmp_path, "", argv=by_shell(LATE_SAVER.format(seconds=3, code=0)), grace_s=10.0)
    process = node.start()
    node.wait_for("ready")
    send(process, signal.SIGTERM)
    assert process.wait(20) == 143
    marker = node.marker()
    assert (marker["step"], marker["killed"], marker["done"]) == (5, False, False)
    assert 3 <= grace_of(marker) < 9, "it leaves when the save is over, not at the end of its grace time"


def test_what_saves_below_a_shell_is_ended_at_the_end_of_the_grace_time(tmp_path):
    node = Node(tmp_path, "", argv=by_shell(LATE_SAVER.format(seconds=60, code=0)), grace_s=1.5)
    process = node.start()
    node.wait_for("ready")
    one(process, signal.SIGTERM)
    assert process.wait(20) == 143
    marker = node.marker()
    assert (marker["killed"], marker["step"]) == (True, None)
    assert 1.4 <= grace_of(marker) < 4


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_the_program_gets_the_signal_that_the_policy_names(tmp_path, number):
    node = Node(tmp_path, LATE_SAVER.format(seconds=0, code=85), stop_signal="USR1")
    process = node.start()
    node.wait_for("ready")
    one(process, number)
    assert process.wait(10) == 85
    assert node.file("got").read_text() == str(int(signal.SIGUSR1))
    assert node.marker()["notice_signal"] == number


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_an_interrupt_or_hangup_is_a_stop_notice(tmp_path, number):
    node = Node(tmp_path, LATE_SAVER.format(seconds=0, code=0))
    process = node.start()
    node.wait_for("ready")
    one(process, number)
    assert process.wait(10) == 85
    assert node.file("got").read_text() == "15"


def test_a_user_signal_is_the_programs_own_affair(tmp_path):
    code = "import signal\nsignal.signal(10, lambda *_: open('got', 'w').close())\n" + WAIT
    node = Node(tmp_path, code)
    process = node.start()
    node.wait_for("ready")
    one(process, signal.SIGUSR1)
    node.wait_for("got")
    one(process, signal.SIGTERM)
    assert process.wait(10) == 143
    assert node.marker()["notice_signal"] == signal.SIGTERM


def test_a_thousand_signals_are_one_notice(tmp_path):
    node = Node(tmp_path, LATE_SAVER.format(seconds=1, code=85))
    process = node.start()
    node.wait_for("ready")
    for _ in range(1000):
        one(process, signal.SIGTERM)
        time.sleep(0.0005)
    assert process.wait(10) == 85
    assert node.file("got").read_text() == "15"
    assert (node.marker()["killed"], node.marker()["step"]) == (False, 5)


def test_nobody_reads_what_it_says_and_the_program_still_saves(tmp_path):
    node = Node(tmp_path, LATE_SAVER.format(seconds=0.2, code=85))
    process = node.start()
    node.wait_for("ready")
    process.stdout.close()
    process.stderr.close()
    one(process, signal.SIGTERM)
    assert process.wait(10) == 85
    assert (node.marker()["exit_code"], node.marker()["step"]) == (85, 5)


FORKING = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: os._exit({code}))
for _ in range(20):  # each end of a child is a signal for jobside, too
    if not os.fork():
        time.sleep(60)
open("ready", "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize("code", [0, 1, 143])
def test_a_program_that_is_faster_than_its_notice_was_noticed(tmp_path, code):
    """The whole group is signalled, and jobside last of all, after the ends of many children."""
    node = Node(tmp_path, FORKING.format(code=code))
    process = node.start()
    node.wait_for("ready")
    time.sleep(0.2)
    program = next(pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if parent(pid) == process.pid)
    os.killpg(program, signal.SIGTERM)
    time.sleep(0.1)
    one(process, signal.SIGTERM)
    assert process.wait(10) == (code or 85)
    assert node.marker()["notice_s"] is not None
    assert node.marker()["done"] is False


def parent(pid):
    try:
        with open(f"/proc/{pid}/stat") as source:
            return int(source.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def test_a_notice_after_the_programs_end_makes_no_stop_of_a_crash(tmp_path):
    """A crash of all ranks: srun signals the others while they clear up what their program has left."""
    code = "import subprocess, sys\nsubprocess.Popen(['/bin/sh', '-c', 'trap : TERM; sleep 60; sleep 60'])\n"
    node = Node(tmp_path, code + "open('ready', 'w').close()\nsys.exit(3)")
    process = node.start()
    node.wait_for("ready")
    time.sleep(1.0)
    one(process, signal.SIGTERM)
    assert process.wait(15) == 3
    assert node.marker()["notice_s"] is None


def test_a_notice_shortly_before_the_walltime_limit_uses_the_time_that_is_left(tmp_path):
    node = Node(tmp_path, LATE_SAVER.format(seconds=60, code=85), grace_s=60.0)
    process = node.start(SLURM_JOB_END_TIME=str(int(time.time()) + 6))
    node.wait_for("ready")
    one(process, signal.SIGTERM)
    assert process.wait(10) == 137
    assert node.marker()["killed"] is True
    assert grace_of(node.marker()) < 6


def test_a_limit_that_was_extended_takes_no_grace_time_away(tmp_path):
    node = Node(tmp_path, LATE_SAVER.format(seconds=2, code=85), grace_s=10.0)
    process = node.start(SLURM_JOB_END_TIME=str(int(time.time()) - 600))
    node.wait_for("ready")
    one(process, signal.SIGTERM)
    assert process.wait(15) == 85
    assert (node.marker()["killed"], node.marker()["step"]) == (False, 5)


SLOW_LOOKUP = "#!/bin/sh\n: > {ready}\nsleep 1\necho localhost\n"


def test_a_notice_while_the_ranks_meeting_place_is_looked_up_starts_no_program(tmp_path):
    node = Node(tmp_path / "work", WAIT, nodes=2)
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text(SLOW_LOOKUP.format(ready=node.file("looked-up")))
    (commands / "scontrol").chmod(0o755)
    process = node.start(PATH=f"{commands}:{os.environ['PATH']}", SLURM_JOB_NODELIST="n[1-2]")
    node.wait_for("looked-up")
    one(process, signal.SIGTERM)
    assert process.wait(10) == 85
    assert not node.file("ready").exists()
    assert node.marker()["program_exit"] is None


@pytest.mark.parametrize("send", [one, group])
def test_grandchildren_in_sessions_of_their_own_are_gone_in_the_end(tmp_path, send):
    code = (
        "import os, time\n"
        "if not os.fork():\n"
        "    os.setsid()\n"
        "    if os.fork():\n"
        "        os._exit(0)\n"
        "    import signal\n"
        "    signal.signal(15, signal.SIG_IGN)\n"
        "    open('daemon', 'w').write(str(os.getpid()))\n"
        "    os.rename('daemon', 'ready')\n"
        "time.sleep(60)\n"
    )
    node = Node(tmp_path, code, grace_s=2.0)
    process = node.start()
    node.wait_for("ready")
    daemon = int(node.file("ready").read_text())
    send(process, signal.SIGTERM)
    process.wait(15)
    assert not alive(daemon)


def test_the_notes_tell_where_to_look(tmp_path):
    node = Node(tmp_path, LATE_SAVER.format(seconds=0, code=85))
    process = node.start()
    node.wait_for("ready")
    assert node.note("start").exists()
    assert (tmp_path / "mailbox" / "heartbeats" / KEY.name).exists()
    one(process, signal.SIGTERM)
    process.wait(10)
    until(node.note("end").exists, "the end's note")
    assert node.note("notice").exists()
