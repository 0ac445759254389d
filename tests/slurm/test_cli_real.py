"""The verbs against the real Slurm: an ordinary user's commands, carried by the real senders, in a worker's environment."""

from __future__ import annotations

import contextlib
import json
import pathlib
import shutil
import signal
import subprocess
import time

import pytest

from airflow_profsched.cluster.scheduler import Order
from airflow_profsched.core import errors
from airflow_profsched.core.jobs import JobKey, TaskKey
from airflow_profsched.core.placement import TaskRequest, resolve
from airflow_profsched.core.policyfile import load_policy
from airflow_profsched.core.profiles import Resources
from airflow_profsched.slurm import records
from airflow_profsched.slurm.script import render
from throwaway import environment, users
from throwaway.lab import until
from throwaway.packages import Unavailable
from throwaway.slurm import Options, ThrowawaySlurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

CARRY = pathlib.Path(__file__).parent / "programs" / "carry.py"
SLEEP = "#!/bin/sh\n#SBATCH --output=/dev/null --no-requeue --time=10\n"
SRUN = "exec srun --export=ALL /bin/sh -c '{}'\n"
POLICY = """\
version: 1
clusters:
  here:
    kind: slurm
    work_dir: {work_dir}
    setup: ["export FROM_SETUP='a b'"]
    profiles: {{training: {{qos: training, partition: train}}}}
"""
WORKERS_OWN = {
    "SLURM_PARTITION": "nosuch",
    "SLURM_JOB_ID": "1",
    "SLURM_NTASKS": "7",
    "SBATCH_QOS": "nosuch",
    "SBATCH_PARTITION": "nosuch",
    "SQUEUE_FORMAT": "%j",
    "SQUEUE_STATES": "PENDING",
    "SACCT_FORMAT": "jobname",
    "SCANCEL_STATE": "PENDING",
    "PMIX_RANK": "3",
    "SLURM_TIME_FORMAT": "relative",
    "LC_ALL": "de_DE.UTF-8",
}


class Desk:
    """A cluster, and a process of the ordinary user's that carries verbs to it."""

    def __init__(self, slurm):
        self.slurm = slurm
        self.environment = environment.make(slurm.dir / "stage")
        self.program = shutil.copy(CARRY, slurm.dir / "stage")
        self.process = None

    def start(self, **variables):
        given = {**self.environment.variables(), **self.slurm.env(), **WORKERS_OWN, **variables}
        self.process = subprocess.Popen(
            [self.environment.python, self.program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd="/", **users.run_as(self.slurm.user, given),
        )  # fmt: skip

    def stop(self):
        self.process.stdin.close()
        self.process.wait(timeout=30)

    def ask(self, verb, *words, how="blocking"):
        """Carry a verb, and raise what it raises."""
        self.process.stdin.write(json.dumps([how, verb, words]) + "\n")
        self.process.stdin.flush()
        said = json.loads(self.process.stdout.readline())
        if "error" in said:
            raise getattr(errors, said["error"])(said["words"])
        return said["answer"]

    def query(self, *jobs, details=(), accounting=True, how="blocking", **changes):
        release = self.site["release"]
        refs = [
            {"job_id": job, "name": "task", "submitted_s": self.begun_s, "user": self.slurm.user, **changes}
            for job in jobs
        ]
        return self.ask("query", refs, [ref for ref in refs if ref["job_id"] in details], release, accounting, how=how)

    def submit(
        self, step="sleep 300", *, nonce="n", name="task", options="-p train --qos=training", script=None, **more
    ):
        comment = records.comment(1, nonce, 1, "training")
        head = f"{SLEEP}#SBATCH --job-name={name} --comment={comment}\n#SBATCH {options}\n"
        return self.ask("submit", script or head + SRUN.format(step), name, nonce, **more)

    def shows(self, job, *states, seconds=60, **more):
        """Wait until a job is in one of some states, and return what it looks like."""
        seen = None

        def ready():
            nonlocal seen
            seen = self.query(job, details=[job], **more).get(job)
            return seen and (seen["state"] in states or seen["state"] in ("done", "failed"))

        with contextlib.suppress(TimeoutError):
            until(f"job {job}", ready, seconds)
        assert seen is not None, f"job {job} is not known"
        assert seen["state"] in states, (seen, self.slurm.tail_logs())
        return seen


@pytest.fixture(scope="module")
def cluster():
    made = ThrowawaySlurm(Options(kill_wait_s=5, extra=["MessageTimeout=5"],  # commands give up sooner
 qos={
        "training": {"Priority": "100", "GraceTime": "10", "PreemptMode": "REQUEUE", "MaxWall": "48:00:00"},
        "inference": {"Priority": "200", "Preempt": "training"},
        "narrow": {"Priority": "100", "MaxWall": "00:05:00"},
    }))  # fmt: skip
    try:
        made.up()
    except Unavailable as error:
        pytest.skip(f"no Slurm here: {error}")
    try:
        desk = Desk(made)
        desk.begun_s = time.time()
        desk.start()
        desk.site = desk.ask("read_site")
        yield desk
        desk.stop()
    finally:
        made.down()


@pytest.fixture
def desk(cluster):
    yield cluster
    cluster.slurm.cancel_all()


both = pytest.mark.parametrize("how", ["blocking", "async"])


@both
def test_a_site_tells_what_it_has(desk, how):
    site = desk.ask("read_site", how=how)
    assert (site["accounting"], site["kill_wait_s"], site["preempt_type"]) == (True, 5, "preempt/qos")
    assert {"train", "infer"} <= set(site["partitions"])
    assert (site["partitions"]["train"]["nodes"], site["partitions"]["train"]["gpus"]) == (2, 8)
    assert (site["qos"]["training"]["grace_s"], site["qos"]["training"]["max_wall_s"]) == (10, 48 * 3600)
    assert (site["qos"]["inference"]["priority"], site["qos"]["inference"]["preempt"]) == (200, ["training"])


STEP = """\
#!/bin/sh
env -0 > "$(dirname "$0")/rank-$SLURM_PROCID"
echo "rank $SLURM_PROCID was here"
"""


@both
def test_a_rendered_gang_runs_as_its_user_with_nothing_of_the_workers(desk, how):
    policy = load_policy(POLICY.format(work_dir=desk.slurm.work_dir), "p.yaml")
    asked = Resources(nodes=2, gpus=2, cpus=3, memory="500M", walltime="10m")
    placed = resolve(policy, TaskRequest(asked, "training"))
    key = JobKey(TaskKey("dag", how, "task"), 1)
    attempt = desk.slurm.work_dir / f"a b%j {how}" / "attempt-1"
    attempt.mkdir(parents=True)
    (attempt / "step.sh").write_text(STEP, encoding="utf-8")
    for place in (attempt, attempt.parent):
        shutil.chown(place, desk.slurm.user)
    script = render(placed, Order(key, "n1", str(attempt)))
    job = desk.ask("submit", script, key.task.name, "n1", how=how)
    seen = desk.shows(job, "done", "failed", name=key.task.name, how=how)
    assert (seen["state"], seen["exit_code"]) == ("done", 0), (attempt / "job.log").read_text()
    assert seen["granted"] | {"nodes": "n[1-2]"} == {
        "qos": "training", "partition": "train", "time_limit_s": 600, "nodes": "n[1-2]"
    }  # fmt: skip
    log = (attempt / "job.log").read_text(encoding="utf-8")
    assert {line for line in log.splitlines() if line} == {"0: rank 0 was here", "1: rank 1 was here"}
    for rank in ("0", "1"):
        env = dict(
            line.split("=", 1) for line in (attempt / f"rank-{rank}").read_text(encoding="utf-8").split("\0") if line
        )
        home = f"/var/lib/{desk.slurm.user}"
        assert (env["HOME"], env["USER"], env["LOGNAME"]) == (home, desk.slurm.user, desk.slurm.user)
        assert "/usr/bin" in env["PATH"].split(":")
        assert env["SLURM_CONF"] == desk.slurm.env()["SLURM_CONF"]
        assert (env["FROM_SETUP"], env["SLURM_NNODES"], env["SLURM_NODEID"]) == ("a b", "2", rank)
        assert (env["SLURM_NTASKS"], env["SLURM_CPUS_PER_TASK"], env["SLURM_JOB_ID"]) == ("2", "3", job)
        assert len(env["CUDA_VISIBLE_DEVICES"].split(",")) == 2, "the step has the job's GPUs"
        assert env["PWD"] == str(attempt)
        assert not {"SBATCH_QOS", "SQUEUE_FORMAT", "SACCT_FORMAT", "PMIX_RANK", "SLURM_PARTITION"} & set(env)


def test_a_living_job_is_found_by_its_name_with_what_its_comment_tells(desk):
    job = desk.submit(nonce="abc")
    desk.submit(name="task2", nonce="other")
    desk.shows(job, "running")
    (found,) = desk.ask("find", "task")
    assert (found["job_id"], found["attempt"], found["nonce"], found["profile"]) == (job, 1, "abc", "training")
    assert (found["state"], found["cancelled"], found["user"]) == ("running", False, desk.slurm.user)
    assert abs(found["submit_s"] - time.time()) < 60
    assert {one["name"] for one in desk.ask("ours")} == {"task", "task2"}
    desk.ask("cancel", job)
    seen = desk.shows(job, "failed")
    assert (seen["cause"], seen["cancel_marked"]) == ("cancelled", True)
    assert desk.ask("find", "task") == []
    desk.ask("cancel", job)
    desk.ask("cancel", "99999")


@both
def test_one_question_tells_how_each_of_many_jobs_stands(desk, how):
    jobs = {
        "done": desk.submit("exit 0"),
        "exit 3": desk.submit("exit 3"),
        "killed": desk.submit("kill -9 $$"),
        "by us": desk.submit(),
        "by root": desk.submit(),
        "running": desk.submit(),
        "begin": desk.submit(options="-p train --qos=training --begin=now+1hour"),
        "held": desk.submit(options="-p train --qos=training --hold"),
    }
    for name, who in (("by us", None), ("by root", "root")):
        desk.shows(jobs[name], "running")
        desk.slurm.command("scancel", jobs[name], user=who)
    for name in ("done", "exit 3", "killed"):
        desk.shows(jobs[name], "done", "failed")
    complete = until(
        "accounting to know who cancelled",
        lambda: (
            (seen := desk.query(*jobs.values(), "99999", how=how))
            and all(one["complete"] for one in seen.values())
            and all(seen[jobs[name]]["cause"] for name in ("by us", "by root"))
            and seen
        ),
        60,
    )
    seen = {name: complete[job] for name, job in jobs.items()}
    assert "99999" not in complete
    assert {name: (one["state"], one["cause"]) for name, one in seen.items()} == {
        "done": ("done", "completed"),
        "exit 3": ("failed", "nonzero_exit"),
        "killed": ("failed", "nonzero_exit"),
        "by us": ("failed", "cancelled"),
        "by root": ("failed", "cancelled"),
        "running": ("running", None),
        "begin": ("queued", None),
        "held": ("queued_held", None),
    }
    assert (seen["exit 3"]["exit_code"], seen["killed"]["exit_code"]) == (3, 137)
    assert seen["by us"]["cancelled_by"].startswith(f"{desk.slurm.user} (uid ")
    assert seen["by root"]["cancelled_by"] == "root (uid 0)"
    assert (seen["begin"]["reason"], seen["held"]["reason"]) == ("BeginTime", "JobHeldUser")
    for name in ("done", "exit 3"):
        assert seen[name]["submit_s"] <= seen[name]["start_s"] <= seen[name]["end_s"] <= time.time() + 1
    assert (seen["begin"]["start_s"], seen["running"]["end_s"]) == (None, None), "a guess is no time"


def test_another_job_of_the_same_id_is_not_ours(desk):
    job = desk.submit()
    desk.shows(job, "running")
    assert desk.query(job, details=[job], name="another") == {}
    assert desk.query(job, details=[job], user="root") == {}
    assert desk.query(job, details=[job], submitted_s=time.time() + 3600) == {}


@pytest.mark.parametrize("leaves", ['trap "exit 0" TERM; sleep 300 & wait', 'trap "exit 85" TERM; sleep 300 & wait'])
def test_a_preempted_job_that_saves_and_leaves_reads_as_preempted(desk, leaves):
    """22.05 calls it COMPLETED or FAILED; PreemptTime tells."""
    job = desk.submit(leaves.replace('"', '"'), options="-p train --qos=training -N2 --gres=gpu:4")
    desk.shows(job, "running")
    time.sleep(1)
    desk.submit("sleep 2", name="urgent", options="-p infer --qos=inference -N2 --gres=gpu:4")
    seen = desk.shows(job, "done", "failed", "requeued")
    assert (seen["state"] in ("done", "failed"), seen["cause"]) == (True, "preempted"), seen
    assert seen["preempt_s"] is not None


def test_a_restarted_job_is_nudged_and_a_held_one_reads_as_held(desk):
    job = desk.submit(options="-p train --qos=training --requeue")
    desk.shows(job, "running")
    desk.slurm.command("scontrol", "requeue", job)
    seen = desk.shows(job, "requeued")
    until("it to be put off", lambda: desk.query(job, details=[job])[job]["reason"] == "BeginTime", 30)
    assert (seen["restarts"], seen["cause"]) == (1, None)
    begun = time.monotonic()
    desk.ask("nudge", job)
    assert desk.shows(job, "running")["restarts"] == 1
    assert time.monotonic() - begun < 20, "not after two minutes"
    desk.slurm.command("scontrol", "requeuehold", job)
    assert desk.shows(job, "requeued_held")["cause"] is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("-p train --qos=nosuch", "Invalid qos"),
        ("-p nosuch", "invalid partition"),
        ("-p train --constraint=nosuch", "Invalid feature"),
        ("-p train --account=nosuch", "Invalid account"),
        ("-p train --gres=gpu:9", "Requested node configuration is not available"),
    ],
)
def test_what_is_refused_is_refused_in_slurms_words(desk, options, words):
    with pytest.raises(errors.SubmitError, match=f"(?i){words}") as caught:
        desk.submit(options=options)
    assert type(caught.value) is errors.SubmitError
    assert desk.ask("find", "task") == []


def test_a_limit_on_queued_jobs_is_waited_for_and_a_limit_on_one_job_is_not(desk):
    desk.slurm.modify_qos("narrow", MaxSubmitJobsPerUser="1", Flags="DenyOnLimit")
    first = desk.submit(options="-p train --qos=narrow --time=1")
    with pytest.raises(errors.SubmitLimitError, match="QOSMaxSubmitJobPerUserLimit"):
        desk.submit(options="-p train --qos=narrow --time=1")
    desk.ask("cancel", first)
    desk.shows(first, "failed")
    with pytest.raises(errors.SubmitError, match="QOSMaxWallDurationPerJobLimit") as caught:
        desk.submit(options="-p train --qos=narrow --time=60")
    assert type(caught.value) is errors.SubmitError, "waiting would not help"


@contextlib.contextmanager
def away(slurm, part):
    slurm.kill(part, signal.SIGTERM)  # properly: a killed controller forgets its newest jobs
    try:
        yield
    finally:
        slurm.start(part)


def test_a_controller_that_is_away_knows_nothing_and_gets_nothing(desk):
    job = desk.submit()
    desk.shows(job, "running")
    with away(desk.slurm, "slurmctld"):
        for ask in (lambda: desk.query(job), desk.submit):
            with pytest.raises(errors.ClusterUnavailableError) as caught:
                ask()
            assert type(caught.value) is errors.ClusterUnavailableError, "nothing went out"
    desk.shows(job, "running")
    assert [one["job_id"] for one in desk.ask("find", "task")] == [job]


def test_a_submission_whose_answer_is_lost_is_found_again(desk):
    desk.slurm.kill("slurmctld", signal.SIGSTOP)
    try:
        with pytest.raises(errors.LostReplyError, match="imed out"):
            desk.submit(nonce="lost")
    finally:
        desk.slurm.kill("slurmctld", signal.SIGCONT)
    found = until("the controller to take it", lambda: desk.ask("find", "task"), 60)
    assert [one["nonce"] for one in found] == ["lost"], "one job, never two"


def test_accounting_that_is_away_hides_no_answer_of_the_controller(desk):
    job = desk.submit()
    desk.shows(job, "running")
    with away(desk.slurm, "slurmdbd"):
        seen = desk.query(job, "99999", details=[job])
        assert (seen[job]["state"], seen["99999"]["state"]) == ("running", "undetermined")
        with pytest.raises(errors.ClusterUnavailableError):
            desk.query("99999")
    assert "99999" not in desk.query(job, "99999")


def test_what_has_left_the_controller_is_told_by_accounting(desk):
    # First: on 24.11 and 26.05 a reconfigured controller tells accounting of its jobs anew, without who cancelled them.
    conf = desk.slurm.dir / "etc" / "slurm.conf"
    conf.write_text(conf.read_text(encoding="utf-8").replace("MinJobAge=300", "MinJobAge=2"), encoding="utf-8")
    assert desk.slurm.command("scontrol", "reconfigure", user="root").returncode == 0
    jobs = {"done": desk.submit("exit 0"), "exit 3": desk.submit("exit 3"), "by root": desk.submit()}
    desk.shows(jobs["by root"], "running")
    desk.slurm.command("scancel", jobs["by root"], user="root")
    ids = jobs.values()
    until(
        "their ends",
        lambda: all(one["state"] in ("done", "failed") for one in desk.query(*ids, details=ids).values()),
        60,
    )
    until("the controller to forget", lambda: not desk.query(*ids, accounting=False), 150, every=2)
    alive = desk.submit()
    desk.shows(alive, "running")
    seen = desk.query(*ids, alive)
    assert {name: seen[job]["cause"] for name, job in jobs.items()} == {
        "done": "completed",
        "exit 3": "nonzero_exit",
        "by root": "cancelled",
    }
    assert (seen[jobs["done"]]["exit_code"], seen[jobs["exit 3"]]["exit_code"]) == (0, 3)
    assert seen[jobs["by root"]]["cancelled_by"] == "root (uid 0)"
    assert seen[alive]["state"] == "running", "one that is gone keeps no other from its answer"
