"""What a node may have or lack: an old python3, a bare locale, a full disk, files that are not there, other ranks."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.unit.node import KEY, Node, alive, one, until


def old_python():
    """A python3.6 of this machine, as RHEL 8 has it."""
    found = shutil.which("python3.6")
    for place in [found] if found else []:
        if subprocess.run([place, "-c", ""], capture_output=True, check=False).returncode == 0:
            return place
    return None


PYTHONS = [
    pytest.param(sys.executable, id="this one"),
    pytest.param(old_python(), id="3.6", marks=pytest.mark.skipif(not old_python(), reason="no python3.6 here")),
]
SHOW = """
import json, os, sys
names = [name for name in os.environb if name.startswith((b"PROFSCHED_", b"ODD", b"PET_", b"MASTER_", b"NODE_RANK"))]
names += [name for name in os.environb if name in (b"RANK", b"LOCAL_RANK", b"WORLD_SIZE", b"NNODES", b"TRACEPARENT")]
shown = {name.decode(): os.environb[name].decode("latin-1") for name in names}
shown["argv"] = [os.fsencode(word).decode("latin-1") for word in sys.argv[1:]]
json.dump(shown, open("shown", "w"))
"""
ODD = "a 'quoted' \"double\" $HOME `id` \\ back\nnew\tline \r \udcff ü #no comment"


def shown(node):
    return json.loads(node.file("shown").read_text())


def latin(text):
    return os.fsencode(text).decode("latin-1")


@pytest.mark.parametrize("python", PYTHONS)
def test_every_byte_arrives_under_the_c_locale(tmp_path, python):
    root = tmp_path / "für\udce9"
    node = Node(
        root, "", argv=[sys.executable, "-c", SHOW, ODD, "Größe"], env={"ODD": ODD, "ODD_2": "", "ODD_3": "export"}
    )
    place = node.file("checkpoints") / "step-3"
    place.mkdir()
    (place / "COMPLETE").touch()
    process = node.start_by(python, LC_ALL="C", LANG=None, LC_CTYPE=None)
    assert process.wait(15) == 0, process.stderr.read()
    seen = shown(node)
    assert (seen["ODD"], seen["ODD_2"], seen["ODD_3"]) == (latin(ODD), "", "export")
    assert seen["argv"] == [latin(ODD), latin("Größe")]
    assert seen["PROFSCHED_RESUME_FROM"] == latin(str(place))
    assert node.marker()["checkpoint"] == str(place)


@pytest.mark.parametrize("python", PYTHONS)
def test_a_notice_and_its_end_under_every_python(tmp_path, python):
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(15, lambda *_: None)\n"
        "child = subprocess.Popen(['sleep', '60'], start_new_session=True)\n"
        "open('child', 'w').write(str(child.pid))\n"
        "open('ready', 'w').close()\n"
        "while True:\n"
        "    time.sleep(60)\n"
    )
    node = Node(tmp_path, code, grace_s=1.0)
    process = node.start_by(python)
    node.wait_for("ready")
    one(process, signal.SIGTERM)
    assert process.wait(15) == 137
    assert node.marker()["killed"] is True
    assert not alive(int(node.file("child").read_text()))


def test_everything_that_is_promised_is_told(tmp_path):
    node = Node(tmp_path, SHOW, attempt=4, grace_s=10.0, traceparent="00-ab-cd-01")
    assert node.start(SLURM_RESTART_COUNT="2").wait(10) == 0
    seen = shown(node)
    del seen["argv"]
    assert seen == {
        "PROFSCHED_PROFILE": "training",
        "PROFSCHED_JOB_KEY": KEY.name,
        "PROFSCHED_CLUSTER": "c",
        "PROFSCHED_ATTEMPT": "6",
        "PROFSCHED_CHECKPOINT_DIR": str(node.file("checkpoints")),
        "PROFSCHED_RESUME_FROM": "",
        "PROFSCHED_RESUME_STEP": "",
        "PROFSCHED_NOTICE_S": "10",
        "PROFSCHED_CHECKPOINT_INTERVAL_S": "12.5",
        "PROFSCHED_RESULT": str(node.attempt_file("result.json")),
        "TRACEPARENT": "00-ab-cd-01",
    }


def test_the_authors_variables_stand_over_the_jobs_and_the_contract_over_both(tmp_path):
    node = Node(tmp_path, SHOW, env={"ODD": "author", "PROFSCHED_PROFILE": "author"})
    assert node.start(ODD="job", ODD_2="job", PROFSCHED_CLUSTER="job").wait(10) == 0
    seen = shown(node)
    assert (seen["ODD"], seen["ODD_2"]) == ("author", "job")
    assert (seen["PROFSCHED_PROFILE"], seen["PROFSCHED_CLUSTER"]) == ("training", "c")


def test_ranks_of_one_node_meet_there(tmp_path):
    node = Node(tmp_path, SHOW, ranks=2, nodes=1, tasks_per_node=2)
    assert node.start(1, SLURM_NODEID="0", SLURM_LOCALID="1").wait(10) == 0
    seen = shown(node)
    assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == ("1", "1", "2")
    assert seen["MASTER_ADDR"] == "127.0.0.1"
    assert "PET_NNODES" not in seen


def test_ranks_of_two_nodes_meet_at_the_first(tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text("#!/bin/sh\necho localhost\necho n2\n")
    (commands / "scontrol").chmod(0o755)
    ports = set()
    for rank in (0, 1):
        node = Node(tmp_path / str(rank), SHOW, ranks=2)
        process = node.start(rank, PATH=f"{commands}:{os.environ['PATH']}", SLURM_JOB_NODELIST="x")
        assert process.wait(10) == 0
        seen = shown(node)
        assert (seen["MASTER_ADDR"], seen["PET_MASTER_ADDR"]) == ("localhost", "localhost")
        assert (seen["NODE_RANK"], seen["NNODES"], seen["PET_NODE_RANK"]) == (str(rank), "2", str(rank))
        assert seen["PET_MASTER_PORT"] == seen["MASTER_PORT"]
        ports.add(int(seen["MASTER_PORT"]))
    assert len(ports) == 1
    assert 20000 <= ports.pop() < 30000


def test_a_first_node_whose_name_nobody_knows_is_reached_by_its_address(tmp_path):
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "scontrol").write_text("#!/bin/sh\necho no-such-host.invalid\n")
    (commands / "scontrol").chmod(0o755)
    node = Node(tmp_path / "work", SHOW, ranks=2)
    path = f"{commands}:{os.environ['PATH']}"
    assert node.start(PATH=path, SLURM_JOB_NODELIST="x", SLURM_LAUNCH_NODE_IPADDR="192.0.2.7").wait(20) == 0
    assert shown(node)["MASTER_ADDR"] == "192.0.2.7"


# ------------------------------------------------------------------------------------------------ what is missing


def test_a_start_in_place_whose_variables_were_deleted_does_not_run_without_them(tmp_path):
    node = Node(tmp_path, "open('ran', 'a').write('x')", env={"A": "1"})
    assert node.start().wait(10) == 0
    process = node.start(SLURM_RESTART_COUNT="1")
    assert process.wait(15) == 85
    assert "variables cannot be read" in process.stderr.read()
    assert node.file("ran").read_text() == "x"
    assert (node.marker()["restart"], node.marker()["done"]) == (1, False)


def test_a_quick_rank_leaves_the_variables_for_a_slow_one(tmp_path):
    node = Node(
        tmp_path, "import os; open(os.environ['SLURM_PROCID'], 'w').write(os.environ['A'])", ranks=2, env={"A": "1"}
    )
    assert node.start(0).wait(10) == 0
    assert node.start(1).wait(10) == 0
    assert node.file("1").read_text() == "1"
    assert not node.attempt_file("env.sh").exists(), "the last one deletes them"


def test_instructions_that_are_not_there_are_said_in_words(tmp_path):
    node = Node(tmp_path, "")
    node.attempt_file("spec.json").write_text('{"version": 1')
    process = node.start()
    assert process.wait(15) == 78
    assert "nothing is started" in process.stderr.read()


def test_a_mailbox_that_is_not_there_stops_no_program(tmp_path):
    node = Node(tmp_path, "open('ran', 'w')")
    shutil.rmtree(tmp_path / "mailbox")
    assert node.start().wait(10) == 0
    assert node.marker()["done"] is True


def test_a_marker_that_cannot_be_written_is_said_and_the_exit_code_still_tells(tmp_path):
    node = Node(tmp_path, "")
    code = "import shutil, sys; shutil.rmtree(sys.argv[1]); sys.exit(3)"
    spec = json.loads(node.attempt_file("spec.json").read_text())
    spec["argv"] = [sys.executable, "-c", code, node.paths.attempt_dir]
    node.attempt_file("spec.json").write_text(json.dumps(spec))
    process = node.start()
    assert process.wait(15) == 3
    assert "marker cannot be written" in process.stderr.read()


def test_a_full_disk_keeps_no_program_from_running(tmp_path):
    """A real file system that is full: a small tmpfs of this user's own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", disk], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("only root can mount a file system")
    try:
        node = Node(disk, "import time; time.sleep(0.5)")
        with open(disk / "filler", "wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(b"x" * 4096)
            except OSError:
                pass
        process = node.start()
        time.sleep(0.5)
        assert process.wait(20) == 0
        assert "marker cannot be written" in process.stderr.read()
        assert not list(node.attempt_file("").glob("*.tmp"))
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize(
    ("content", "words"),
    [("{", "result is none"), ("[" * 100_000, "result is none"), ("null", "")],
    ids=["{", "deep", "null"],
)
def test_a_result_that_is_none_is_said(tmp_path, content, words):
    code = f"import os; open(os.environ['PROFSCHED_RESULT'], 'w').write({content!r})"
    node = Node(tmp_path, code)
    process = node.start()
    assert process.wait(10) == 0
    assert words in process.stderr.read()
    assert node.marker()["result"] is (not words)


def test_a_result_of_an_earlier_start_is_none_of_this_one(tmp_path):
    node = Node(
        tmp_path, "import signal, time; signal.signal(15, lambda *_: exit(0)); open('ready', 'w'); time.sleep(60)"
    )
    node.attempt_file("result.json").write_text("{}")
    process = node.start(SLURM_RESTART_COUNT="1")
    node.wait_for("ready")
    one(process, signal.SIGTERM)
    assert process.wait(10) == 85


def test_an_inference_that_leaves_by_0_after_a_notice_is_not_done_either(tmp_path):
    node = Node(tmp_path, "import signal, time; signal.signal(15, lambda *_: exit(0)); open('ready', 'w'); time.sleep(60)",
                preemptible=False, profile="inference")  # fmt: skip
    process = node.start()
    node.wait_for("ready")
    one(process, signal.SIGTERM)
    assert process.wait(10) == 85
    assert node.marker()["done"] is False


def test_starts_in_place_are_counted_where_the_cluster_does_not(tmp_path):
    node = Node(tmp_path, SHOW + "\nos.kill(os.getppid(), 9)")
    for attempt in ("1", "2", "3"):
        node.start(SLURM_JOB_ID=None, SLURM_RESTART_COUNT=None).wait(10)
        assert shown(node)["PROFSCHED_ATTEMPT"] == attempt


@pytest.mark.parametrize("mode", ["r", "x"])
def test_a_program_that_may_not_be_executed_says_so(tmp_path, mode):
    program = tmp_path / "program"
    program.write_text("no program at all")
    program.chmod(0o600 if mode == "r" else 0o700)
    node = Node(tmp_path / "work", "", argv=[str(program)])
    process = node.start()
    assert process.wait(10) == 126
    assert "cannot be started" in process.stderr.read()
    assert node.marker()["done"] is False


# ------------------------------------------------------------------------------------------------ ranks

PATIENT = """
import os, signal, sys, time
rank = os.environ["SLURM_PROCID"]
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
open("ready-" + rank, "w").close()
if rank == "1" and {crash}:
    time.sleep(0.3)
    sys.exit(3)
while not asked:
    time.sleep(0.05)
time.sleep({seconds} if rank == "0" else 0)
open("saved-" + rank, "w").close()
sys.exit(85)
"""


def start_both(node):
    ranks = [node.start(0), node.start(1)]
    node.wait_for("ready-0")
    node.wait_for("ready-1")
    return ranks


def test_a_crash_before_the_notice_stays_a_crash_and_its_neighbour_may_save(tmp_path):
    """What `srun -K` does: the crash of one rank is the stop notice of the others."""
    node = Node(tmp_path, PATIENT.format(crash=True, seconds=1), ranks=2)
    ranks = start_both(node)
    assert ranks[1].wait(10) == 3
    one(ranks[0], signal.SIGTERM)
    assert ranks[0].wait(10) == 85
    assert node.file("saved-0").exists()
    crashed, saved = node.marker(1), node.marker(0)
    assert (crashed["notice_s"], crashed["exit_code"]) == (None, 3)
    assert saved["notice_s"] > crashed["ended_s"]


def test_a_rank_that_never_ends_holds_the_others_no_longer_than_their_grace_time(tmp_path):
    node = Node(tmp_path, PATIENT.format(crash=False, seconds=0), ranks=2, grace_s=2.0)
    ranks = start_both(node)
    ranks[1].kill()
    began = time.monotonic()
    one(ranks[0], signal.SIGTERM)
    assert ranks[0].wait(10) == 85
    assert 1.5 < time.monotonic() - began < 5
    (stray,) = [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if own(pid, node)]
    os.kill(stray, signal.SIGKILL)


def own(pid, node):
    """Whether a process works in this node's directory."""
    try:
        return pathlib.Path(f"/proc/{pid}/cwd").readlink() == pathlib.Path(node.paths.task_dir)
    except OSError:
        return False


def test_a_rank_that_waits_spends_no_time(tmp_path):
    node = Node(tmp_path, PATIENT.format(crash=False, seconds=2.5), ranks=2, grace_s=10.0)
    ranks = start_both(node)
    for process in ranks:
        one(process, signal.SIGTERM)
    until(node.attempt_file("rank-1.end").exists, "the quick rank's marker")
    before = spent(ranks[1].pid)
    time.sleep(1.5)
    assert spent(ranks[1].pid) - before < 0.2
    assert [process.wait(10) for process in ranks] == [85, 85]


def spent(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
