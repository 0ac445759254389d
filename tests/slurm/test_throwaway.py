"""The throwaway Slurm itself: what the other suites stand on has to hold."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from throwaway import processes, users
from throwaway.slurm import Options, ThrowawaySlurm, Unavailable, free_ports

pytestmark = pytest.mark.slurm

CHECKOUT = Path(__file__).resolve().parents[2]
TRAINING = ("-p", "train", "--qos=training")
INFERENCE = ("-p", "infer", "--qos=inference")

# Each rank says when it was told to stop; then it stays, or leaves with 85.
RANK = """
import os, signal, sys, time
def told(number, frame):
    with open(sys.argv[1] + "/told-" + os.environ["SLURM_PROCID"], "a") as out:
        out.write("%d %f\\n" % (number, time.time()))
    if sys.argv[2] == "leaves":
        sys.exit(85)
signal.signal(signal.SIGTERM, told)
open(sys.argv[1] + "/up-" + os.environ["SLURM_PROCID"], "w").close()
while True:
    time.sleep(0.1)
"""


def up(options=None, **arguments):
    slurm = ThrowawaySlurm(options, **arguments)
    began = time.monotonic()
    try:
        slurm.up()
    except Unavailable as error:
        pytest.skip(f"no Slurm here: {error}")
    took = time.monotonic() - began
    print(f"\n{slurm.options.accounting=}: up in {took:.1f} s")
    return slurm, took


@pytest.fixture(scope="module")
def shared():
    """One cluster, quick to kill, for all tests that leave it as it was."""
    slurm, _ = up(Options(kill_wait_s=2))
    yield slurm
    slurm.down()


@pytest.fixture
def slurm(shared):
    yield shared
    shared.cancel_all()


def eventually(what, seconds=30):
    until = time.monotonic() + seconds
    while not (seen := what()):
        assert time.monotonic() < until, "not within the time"
        time.sleep(0.1)
    return seen


def submit(slurm, *argv, script="#!/bin/sh\nsleep 300\n", user=None):
    done = slurm.command("sbatch", "--parsable", "-o", "/dev/null", *argv, stdin=script, user=user)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def state(slurm, job):
    return slurm.command("scontrol", "show", "job", job).stdout.partition("JobState=")[2].split()[0]


def accounted(slurm, job):
    """State and exit code of the job itself, once accounting knows its end."""
    argv = ("sacct", "-nPX", "-j", job, "-o", "state,exitcode,end")

    def ended():
        lines = slurm.command(*argv).stdout.split()
        return lines and not lines[0].endswith("Unknown") and lines[0].split("|")[:2]

    return eventually(ended)


def train(slurm, what, *options):
    """Start a training on every GPU; return its id and the directory in which its ranks speak."""
    place = slurm.work_dir / f"{what}-{time.monotonic_ns()}"
    place.mkdir()
    os.chown(place, slurm.work_dir.stat().st_uid, -1)
    program = place / "rank.py"
    program.write_text(RANK, encoding="utf-8")
    program.chmod(0o644)
    script = f"#!/bin/sh\nexec srun --export=ALL /usr/bin/python3 {program} {place} {what}\n"
    job = submit(slurm, "--no-requeue", *options, "-N2", "--gres=gpu:4", script=script)
    eventually(lambda: len(list(place.glob("up-*"))) == 2)
    return job, place


def told(place):
    """Wait until both ranks were told to stop; return what they were told first, and when."""
    files = eventually(lambda: (seen := sorted(place.glob("told-*"))) and len(seen) == 2 and seen)
    return [(int(number), float(when)) for number, when in (file.read_text().split()[:2] for file in files)]


def mention(directory):
    """Everything on this machine whose command line or environment names a directory."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                text = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
            except OSError:
                continue
            if str(directory).encode() in text:
                found.append(text)
    return found


def hiding():
    done = subprocess.run(["pgrep", "-fc", "^/bin/sleep 987.25"], check=False, capture_output=True, text=True)
    return int(done.stdout)


def test_up_within_half_a_minute_and_nothing_left():
    slurm, took = up()
    directory = slurm.dir
    try:
        assert took < 30
        assert directory.parent == Path("/tmp")
        # Jobs that hide: one has emptied its environment, one has left its session as well.
        submit(slurm, *TRAINING, script="#!/bin/sh\nenv -i /bin/sleep 987.25\n")
        submit(slurm, *TRAINING, script="#!/bin/sh\nenv -i setsid /bin/sleep 987.25 &\nsleep 300\n")
        eventually(lambda: hiding() == 2)
    finally:
        slurm.down()
    assert eventually(lambda: hiding() == 0)
    assert not directory.exists()
    assert eventually(lambda: not mention(directory), 5)


def test_a_training_that_stays_is_preempted(slurm):
    slurm.set_grace("training", 3)
    training, place = train(slurm, "stays", *TRAINING)
    asked = time.time()
    inference = submit(slurm, *INFERENCE, "-N1", "--gres=gpu:1")
    assert [number for number, _ in told(place)] == [signal.SIGTERM] * 2
    assert all(when - asked < 5 for _, when in told(place))
    assert accounted(slurm, training)[0] == "PREEMPTED"
    eventually(lambda: state(slurm, inference) == "RUNNING")


def test_a_training_that_leaves_in_its_grace_time(slurm):
    training, place = train(slurm, "leaves", *TRAINING)
    inference = submit(slurm, *INFERENCE, "-N2", "--gres=gpu:4")
    assert len(told(place)) == 2
    # 22.05 accounts for it by its own exit code; PreemptTime in the controller is all that tells why. Later: PREEMPTED.
    assert accounted(slurm, training) in (["FAILED", "85:0"], ["PREEMPTED", "85:0"])
    row = slurm.command("squeue", "-h", "-t", "all", "-j", training, "-O", "PreemptTime:|").stdout
    assert row.strip("|\n ") not in ("", "N/A")
    eventually(lambda: state(slurm, inference) == "RUNNING")


def test_an_inference_is_never_preempted(slurm):
    inference = submit(slurm, *INFERENCE, "-N2", "--gres=gpu:4")
    eventually(lambda: state(slurm, inference) == "RUNNING")
    waiting = [submit(slurm, *TRAINING, "--gres=gpu:1"), submit(slurm, *INFERENCE, "--gres=gpu:1", user=users.OTHER)]
    time.sleep(3)  # three rounds of the scheduler
    assert state(slurm, inference) == "RUNNING"
    assert [state(slurm, job) for job in waiting] == ["PENDING"] * 2


@pytest.mark.parametrize("partition", [(), ("-p", "train"), ("-p", "infer"), ("-p", "all")])
@pytest.mark.parametrize("qos", ["training", "inference"])
def test_every_partition_lets_both_qos_in(slurm, partition, qos):
    job = submit(slurm, *partition, f"--qos={qos}", "--constraint=a100&ib", "--gres=gpu:1", script="#!/bin/sh\n:\n")
    assert accounted(slurm, job) == ["COMPLETED", "0:0"]


@pytest.mark.parametrize(("mode", "becomes"), [("REQUEUE", "PENDING"), ("CANCEL", "PREEMPTED")])
def test_the_qos_says_what_becomes_of_a_preempted_job(slurm, mode, becomes):
    slurm.set_grace("training", 0)
    slurm.modify_qos("training", PreemptMode=mode)
    training, _ = train(slurm, "leaves", *TRAINING, "--requeue")
    submit(slurm, *INFERENCE, "-N1", "--gres=gpu:1")
    eventually(lambda: state(slurm, training) == becomes, 60)


def limits(slurm):
    argv = (
        "sacctmgr",
        "-nP",
        "show",
        "qos",
        "format=name,priority,gracetime,grptres,maxwall,preempt,preemptmode,maxjobspu",
    )
    return set(slurm.command(*argv, user="root").stdout.split())


def test_the_limits_are_the_sites_and_come_back(slurm):
    made = limits(slurm)
    assert "training|100|00:00:10|gres/gpu=512|2-00:00:00||requeue|" in made
    assert "inference|200|00:00:00|gres/gpu=64|02:00:00|training|cluster|" in made
    slurm.set_grace("training", 0)
    slurm.modify_qos("training", PreemptMode="CANCEL", MaxJobsPU="1")
    slurm.modify_qos("inference", MaxJobsPU="3", Preempt="normal", GrpTRES="gres/gpu=1")
    slurm.modify_qos("normal", GraceTime="7", MaxJobsPU="2")
    assert not limits(slurm) & made
    slurm.cancel_all()
    assert limits(slurm) == made


def test_cancel_all_is_quick_with_those_that_do_not_listen(slurm):
    train(slurm, "stays", *TRAINING)
    submit(slurm, *TRAINING, "--gres=gpu:1", "--hold")
    submit(slurm, "--qos=normal", user=users.OTHER)
    began = time.monotonic()
    slurm.cancel_all()
    assert time.monotonic() - began < 10
    assert not slurm.command("squeue", "-h").stdout


@pytest.mark.parametrize("part", ["slurmctld", "slurmdbd", "mariadb", "n1", "n2", "munged"])
def test_parts_break_and_come_back(slurm, part):
    slurm.kill(part)
    slurm.start(part)
    slurm.restart(part)
    # The controller's link to accounting is made anew by and by.
    eventually(lambda: "2" in slurm.command("sinfo", "-h", "-t", "idle", "-o", "%D").stdout)
    job = submit(slurm, *TRAINING, "-N2", "--gres=gpu:4", script="#!/bin/sh\nexec srun --export=ALL true\n")
    assert accounted(slurm, job) == ["COMPLETED", "0:0"]


def test_a_stopped_part_goes_on(slurm):
    slurm.kill("slurmctld", signal.SIGSTOP)
    slurm.kill("slurmctld", signal.SIGCONT)
    slurm.kill("slurmctld", signal.SIGHUP)  # reads its configuration anew, and lives
    assert processes.started(slurm.pids["slurmctld"])
    assert slurm.command("scontrol", "ping").stdout.count("UP") == 1


def test_two_side_by_side():
    one, other = clusters = (ThrowawaySlurm(Options(gpu_type="a100")), ThrowawaySlurm(Options(nodes=1)))
    try:
        with ThreadPoolExecutor() as both:
            list(both.map(ThrowawaySlurm.up, clusters))
        job = submit(one, *TRAINING, "--gres=gpu:a100:4", script="#!/bin/sh\n:\n")
        assert accounted(one, job) == ["COMPLETED", "0:0"]
        assert not other.command("squeue", "-h", "-t", "all").stdout
        names = {
            line
            for cluster in clusters
            for line in cluster.command("scontrol", "show", "config").stdout.split("\n")
            if "ClusterName" in line
        }
        assert len(names) == 2
        os.kill(one.pids["mariadb"], signal.SIGSTOP)  # broken on purpose: it still goes
        one.down()
        assert accounted(other, submit(other, *TRAINING, script="#!/bin/sh\n:\n")) == ["COMPLETED", "0:0"]
    finally:
        for cluster in clusters:
            cluster.down()


@pytest.mark.parametrize(
    ("mode", "requeue", "becomes"),
    [
        ("REQUEUE", "--no-requeue", "PREEMPTED"),
        ("REQUEUE", "--requeue", "PENDING"),
        ("CANCEL", "--requeue", "PREEMPTED"),
    ],
)
def test_without_accounting_partitions_decide(mode, requeue, becomes):
    slurm, _ = up(Options(accounting=False, kill_wait_s=2, grace_s=3, preempt_mode=mode))
    try:
        assert not {"slurmdbd", "mariadb"} & set(slurm.pids)
        training, place = train(slurm, "stays", "-p", "train", requeue)
        inference = submit(slurm, "-p", "infer", "-N1", "--gres=gpu:1")
        assert [number for number, _ in told(place)] == [signal.SIGTERM] * 2
        eventually(lambda: state(slurm, training) == becomes, 60)
        eventually(lambda: state(slurm, inference) == "RUNNING")
    finally:
        slurm.down()


def test_whoever_only_talks_to_it_is_left_alone(tmp_path):
    slurm, _ = up(Options(accounting=False))
    bystander = subprocess.Popen(["sleep", "300"], env={**os.environ, **slurm.env()}, cwd=tmp_path)
    try:
        slurm.down()
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_directories_that_are_none_of_its_own(tmp_path):
    (tmp_path / "thesis").write_text("ten years")
    slurm = ThrowawaySlurm(Options(accounting=False), directory=tmp_path)
    slurm.down()
    with pytest.raises(RuntimeError, match="not empty"):
        slurm.up()
    slurm.down()
    with pytest.raises(RuntimeError, match=r"no pids\.json"):
        ThrowawaySlurm.attach(tmp_path)
    assert (tmp_path / "thesis").read_text() == "ten years"


def test_a_directory_that_the_user_cannot_enter(tmp_path):
    tmp_path.chmod(0o700)
    slurm = ThrowawaySlurm(Options(accounting=False), directory=tmp_path / "deep")
    with pytest.raises(RuntimeError, match="cannot enter"):
        slurm.up()
    assert not (tmp_path / "deep").exists()


def test_a_failed_start_says_who_and_why():
    slurm = ThrowawaySlurm(Options(accounting=False, extra=["SelectType=select/nosuch"]))
    with pytest.raises(RuntimeError, match=r"(?s)slurmctld ended.*slurmctld\.log.*nosuch"):
        slurm.up()
    assert not slurm.pids


def test_as_a_command():
    def run(*argv):
        command = [sys.executable, "-m", "throwaway.slurm", *argv]
        return subprocess.run(command, check=False, cwd=CHECKOUT, capture_output=True, text=True)

    done = run("up", "--no-accounting")
    assert done.returncode == 0, done.stderr
    conf = Path(done.stdout.partition("export SLURM_CONF=")[2].split()[0])
    directory = conf.parent.parent
    try:
        slurm = ThrowawaySlurm.attach(directory)
        assert "idle" in slurm.command("sinfo").stdout
        assert f"down {directory}" in done.stdout
        assert "not empty" in run("up", "--dir", str(directory)).stderr
    finally:
        ended = run("down", str(directory))
    assert ended.returncode == 0, ended.stderr
    assert not directory.exists()
    assert eventually(lambda: not mention(directory), 5)
    again = run("down", str(directory))
    assert again.returncode
    assert "no throwaway Slurm" in again.stderr
    assert "Traceback" not in again.stderr


def test_ports_are_given_once():
    ports = free_ports(100)
    assert len({*ports, *free_ports(100)}) == 200
    assert max(ports) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
