"""jobside with real processes and real signals: to its own pid alone, as some clusters send them, and to the whole group."""

from __future__ import annotations

import ast
import json
import os
import pathlib
import signal
import subprocess
import time

import pytest

from airflow_profsched.cluster import carry
from tests.unit.node import KEY, Node, group, once, one, repeatedly

SOURCES = pathlib.Path(carry.__file__).parent.parent / "jobside"

WAIT = "import time\nopen('ready', 'w').close()\ntime.sleep(60)\n"
SAVE = """
import os, signal, sys, time, json
asked = []
signal.signal(signal.SIGTERM, lambda number, frame: asked.append(number))  # it may come twice
open("ready", "w").close()
while not asked:
    time.sleep(0.05)
place = os.path.join(os.environ["PROFSCHED_CHECKPOINT_DIR"], "step-5")
os.makedirs(place)
time.sleep({seconds})
open(os.path.join(place, "COMPLETE"), "w").close()
{declare}
sys.exit({code})
"""
DECLARE = 'json.dump({"a": 1}, open(os.environ["PROFSCHED_RESULT"], "w"))'


@pytest.mark.parametrize("send", [one, group])
@pytest.mark.parametrize("times", [once, repeatedly])
@pytest.mark.parametrize(("code", "left"), [(0, 85), (85, 85), (143, 143), (1, 1)])
def test_a_program_that_saves_is_a_stop_and_not_done(tmp_path, send, times, code, left):
    node = Node(tmp_path, SAVE.format(seconds=0.2, declare="", code=code))
    process = node.start()
    node.wait_for("ready")
    times(send, process)
    assert process.wait(10) == left
    marker = node.marker()
    assert (marker["done"], marker["exit_code"], marker["step"], marker["killed"]) == (False, left, 5, False)
    assert marker["notice_s"] <= marker["ended_s"]
    assert (tmp_path / "mailbox" / f"{KEY.name}.notice").exists()


@pytest.mark.parametrize("send", [one, group])
def test_a_result_declares_the_run_done_after_a_notice(tmp_path, send):
    node = Node(tmp_path, SAVE.format(seconds=0, declare=DECLARE, code=0))
    process = node.start()
    node.wait_for("ready")
    send(process, signal.SIGTERM)
    assert process.wait(10) == 0
    assert node.marker()["done"] is True


@pytest.mark.parametrize("send", [one, group])
def test_a_program_without_a_handler_that_dies_of_the_groups_signal_was_noticed(tmp_path, send):
    node = Node(tmp_path, WAIT)
    process = node.start()
    node.wait_for("ready")
    send(process, signal.SIGTERM)
    assert process.wait(10) == 143
    marker = node.marker()
    assert marker["notice_s"] is not None
    assert (marker["signal"], marker["done"]) == (15, False)


IGNORE = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal,time; signal.signal(15, signal.SIG_IGN); time.sleep(60)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
open("child", "w").write(str(child.pid))
open("ready", "w").close()
time.sleep(60)
"""


@pytest.mark.parametrize("times", [once, repeatedly])
def test_a_program_that_ignores_the_notice_is_ended_with_everything_below_it(tmp_path, times):
    node = Node(tmp_path, IGNORE, grace_s=1.0)
    process = node.start()
    node.wait_for("ready")
    time.sleep(0.2)
    times(one, process)
    assert process.wait(15) == 137
    assert node.marker()["killed"] is True
    child = int(node.file("child").read_text())
    assert not pathlib.Path(f"/proc/{child}").exists() or "Z" in pathlib.Path(f"/proc/{child}/stat").read_text()


def test_a_child_that_outlives_the_program_is_ended(tmp_path):
    node = Node(tmp_path, IGNORE.rsplit("time.sleep(60)", 1)[0])
    process = node.start()
    assert process.wait(15) == 0
    child = int(node.file("child").read_text())
    assert not pathlib.Path(f"/proc/{child}").exists() or "Z" in pathlib.Path(f"/proc/{child}/stat").read_text()


def test_an_end_without_a_notice_is_done_at_exit_0_alone(tmp_path):
    node = Node(tmp_path, "print('hello')")
    assert node.start().wait(10) == 0
    assert (node.marker()["done"], node.marker()["notice_s"]) == (True, None)
    crash = Node(tmp_path / "two", "raise SystemExit(3)")
    assert crash.start().wait(10) == 3
    assert (crash.marker()["done"], crash.marker()["exit_code"]) == (False, 3)


def test_ranks_that_save_wait_for_each_other(tmp_path):
    quick = "SLOW = int(__import__('os').environ['SLURM_PROCID'])\n" + SAVE.format(
        seconds="1.5 * SLOW", declare="", code=85
    )
    quick = quick.replace('"step-5")', '"step-5") + str(SLOW)').replace(
        'open("ready", "w")', 'open("ready-%d" % SLOW, "w")'
    )
    node = Node(tmp_path, quick, ranks=2)
    ranks = [node.start(0), node.start(1)]
    node.wait_for("ready-0")
    node.wait_for("ready-1")
    for process in ranks:
        one(process, signal.SIGTERM)
    ranks[0].wait(10)
    assert node.marker(1)["exit_code"] == 85, "the quick rank stays until the slow one has saved"
    assert node.marker(0)["ended_s"] < node.marker(1)["ended_s"]
    assert ranks[1].wait(10) == 85


def test_a_signal_before_the_program_starts_counts(tmp_path):
    node = Node(tmp_path, WAIT, fence_s=5)
    process = node.start()
    until = time.monotonic() + 10
    while not (tmp_path / "mailbox" / f"{KEY.name}.start").exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    one(process, signal.SIGTERM)
    assert process.wait(10) == 85
    assert not node.file("ready").exists()
    assert node.marker()["notice_s"] is not None


def test_a_later_attempt_in_the_owner_file_ends_the_program(tmp_path):
    node = Node(tmp_path, WAIT)
    process = node.start()
    node.wait_for("ready")
    node.file("owner").write_text(json.dumps({"version": 1, "task": KEY.task.name, "attempt": 2}))
    assert process.wait(10) == 137
    assert node.marker()["fenced"] is True


def test_another_tasks_directory_is_refused(tmp_path):
    node = Node(tmp_path, WAIT)
    node.file("owner").write_text(json.dumps({"version": 1, "task": "another", "attempt": 1}))
    assert node.start().wait(10) == 78
    assert not node.file("ready").exists()


ODD = "a 'quoted' \"double\" $HOME `id` \\ back\nnew\tline \udcff ü"
SHOW = "import os\nnames = ['ODD', 'PET_NNODES', 'PET_NPROC_PER_NODE', 'NODE_RANK', 'PROFSCHED_RESUME_STEP']\n"
SHOW += "names.append('PROFSCHED_CHECKPOINT_INTERVAL_S')\n"
SHOW += "open('shown', 'wb').write(b'\\0'.join(os.environb.get(name.encode(), b'-') for name in names))\n"


def test_the_environment_arrives_byte_for_byte(tmp_path):
    node = Node(tmp_path, SHOW, env={"ODD": ODD})
    checkpoint = node.file("checkpoints") / "step-3"
    checkpoint.mkdir()
    (checkpoint / "COMPLETE").touch()
    process = node.start()
    assert process.wait(10) == 0, process.stderr.read()
    shown = node.file("shown").read_bytes().split(b"\0")
    assert shown == [os.fsencode(ODD), b"-", b"-", b"-", b"3", b"12.5"]
    assert not (pathlib.Path(node.paths.attempt_dir) / "env.sh").exists()


def test_ranks_know_where_they_meet(tmp_path):
    node = Node(tmp_path, SHOW, ranks=2)
    assert node.start(1).wait(10) == 0
    assert node.file("shown").read_bytes().split(b"\0")[1:4] == [b"2", b"4", b"1"]


def test_a_program_that_is_not_there_says_so(tmp_path):
    node = Node(tmp_path, "", argv=["/no/such/program"])
    process = node.start()
    assert process.wait(10) == 127
    assert "cannot be started" in process.stderr.read()
    assert node.marker()["exit_code"] == 127


def test_a_file_beside_the_program_shadows_no_library(tmp_path):
    node = Node(tmp_path, "print(1)")
    node.file("json.py").write_text("raise SystemExit(9)")
    assert node.start().wait(10) == 0


def test_a_node_without_python_runs_the_bare_command(tmp_path):
    """The only thing replaced is the node's PATH: a directory without python3."""
    node = Node(tmp_path, "", argv=["/bin/sh", "-c", 'echo "$ODD" > out'], env={"ODD": "x y"})
    bare = tmp_path / "bin"
    bare.mkdir()
    done = subprocess.run(
        ["/bin/sh", f"{node.paths.attempt_dir}/step.sh"],
        env={"PATH": str(bare)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "no python3 >= 3.6" in done.stderr
    assert node.file("out").read_text() == "x y\n"
    assert (pathlib.Path(node.paths.attempt_dir) / "plain").exists()


@pytest.mark.parametrize("source", sorted(SOURCES.glob("*.py")), ids=lambda path: path.name)
def test_it_is_written_in_the_syntax_of_python_3_6(source):
    ast.parse(source.read_text(encoding="utf-8"), feature_version=(3, 6))
