"""Every other way a job ends, on the real Slurm and through real triggers: what is the user's error, and what is not."""

from __future__ import annotations

import functools
import json

import pytest

from throwaway.lab import until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


def run(lab, slot, command, *, operator="WorkloadOperator", seconds=240, meanwhile=None, lab_env=None, **arguments):
    """Run a task to its end."""
    body = {
        "command": [word.replace("LAB", str(lab.home)) for word in command],
        "profile": "training",
        "cluster": slot,
        "resources": {"nodes": 1, "gpus": 1, "cpus": 1},
        "deferrable": True,
        "retries": 0,
        **arguments,
    }
    task = lab.task(operator, body, env=lab_env)
    if meanwhile is not None:
        meanwhile(lab, task)
    result = task.wait(seconds)
    return result, task, lab


def scenario(command, **arguments):
    return pytest.mark.scenario(functools.partial(_scenario, command=command, arguments=arguments))


def _scenario(lab, slot, command, arguments):
    return run(lab, slot, command, **arguments)


TRAINER = ["/usr/bin/python3", "LAB/trainer.py"]


@scenario([*TRAINER, "--steps", "20", "--crash-at", "5", "--crash-once"], retries=1, retry_delay=0)
def test_exit_3_spends_one_retry_and_says_so(outcome):
    result, task, _ = outcome
    assert result["state"] == "success", task.log()[-4000:]
    assert result["try_number"] == 2
    assert "with exit code 3" in task.log()
    assert "The last lines of its log:" in task.log()


@scenario(
    [*TRAINER, "--steps", "60", "--crash-at", "5", "--crash-rank", "1"], resources={"nodes": 2, "gpus": 1, "cpus": 1}
)
def test_exit_3_on_any_rank_of_a_gang_is_that_ranks_exit_3(outcome):
    result, task, _ = outcome
    assert result["state"] == "failed"
    assert "with exit code 3 on rank 1" in task.log()
    assert [attempt["ended_by"] for attempt in result["record"]["attempts"]] == ["nonzero_exit"]
    assert len(task.steps()) < 30, "the other rank is taken along"


def _scancel(user, lab, task):
    until("steps", lambda: len(task.steps()) > 3, 60)
    lab.slurm.command("scancel", f"--name={_name(lab, task)}", user=user)


def _name(lab, task):
    rows = lab.slurm.command("squeue", "-h", "-o", "%j", user="root").stdout.split()
    return next(row for row in rows if row.startswith(f"{task.name}-"))


@pytest.mark.parametrize(
    "who",
    [
        pytest.param(
            who,
            marks=scenario(
                [*TRAINER, "--steps", "500"], retries=2, retry_delay=0, meanwhile=functools.partial(_scancel, user)
            ),
        )
        for who, user in (("profsched", None), ("root", "root"))
    ],
)
def test_a_job_cancelled_on_the_cluster_is_not_resumed(who, outcome):
    result, task, _ = outcome
    assert result["state"] == "failed"
    assert result["try_number"] == 1, "no retry is spent on what somebody wanted"
    assert f"was cancelled on the cluster by {who} (uid " in task.log()
    assert len(result["record"]["attempts"]) == 1


@scenario(
    [*TRAINER, "--steps", "400", "--on-notice", "0", "--delay", "0.5"],
    resources={"nodes": 1, "gpus": 1, "cpus": 1, "walltime": "2m"},
    seconds=500,
)
def test_a_program_that_exits_0_after_the_walltime_notice_goes_on(outcome):
    result, task, _ = outcome
    assert result["state"] == "success", task.log()[-4000:]
    assert result["try_number"] == 1
    attempts = result["record"]["attempts"]
    assert {attempt["ended_by"] for attempt in attempts[:-1]} == {"timeout"}
    assert len(attempts) > 1
    assert [step for _, step, _ in task.steps()] == list(range(1, 401))


@scenario(
    [*TRAINER, "--steps", "4000", "--on-notice", "ignore", "--every", "0"],
    resources={"nodes": 1, "gpus": 1, "cpus": 1, "walltime": "1m"},
    retries=2,
    retry_delay=0,
)
def test_a_walltime_limit_without_a_newer_checkpoint_ends_at_the_first_time(outcome):
    result, task, _ = outcome
    assert result["state"] == "failed"
    assert result["try_number"] == 1
    assert [attempt["ended_by"] for attempt in result["record"]["attempts"]] == ["timeout"]
    assert "reached its walltime limit" in task.log()
    assert "there was no checkpoint" in task.log()


@scenario(
    [*TRAINER, "--steps", "4000", "--on-notice", "ignore", "--every", "0", "--save-first", "7"],
    resources={"nodes": 1, "gpus": 1, "cpus": 1, "walltime": "1m"},
    seconds=400,
)
def test_the_walltime_message_names_the_checkpoint_step(outcome):
    result, task, _ = outcome
    assert result["state"] == "failed"
    assert [attempt["ended_by"] for attempt in result["record"]["attempts"]] == ["timeout", "timeout"]
    assert "the newest is of step 7" in task.log()


REFUSED = {
    "bad_qos": "nosuch",
    "bad_partition": "nosuch",
    "bad_constraint": "nosuch",
    "narrow": "QoS narrow may have together (gres/gpu 4 of 2)",
    "narrow_wall": "QOSMaxWallDurationPerJobLimit",
}


@pytest.mark.parametrize(
    "profile",
    [
        pytest.param(
            profile,
            marks=scenario(
                ["true"],
                profile=profile,
                resources={"gpus": 4 if profile == "narrow" else 1, "walltime": "4m" if profile == "narrow" else "1h"},
                retries=1,
                retry_delay=0,
            ),
        )
        for profile in REFUSED
    ],
)
def test_what_can_never_run_fails_at_once_in_words(profile, outcome):
    result, task, lab = outcome
    assert result["state"] == "failed"
    assert result["try_number"] == 1
    assert REFUSED[profile] in task.log(), task.log()[-3000:]
    names = lab.slurm.command("squeue", "-h", "-o", "%j", user="root").stdout
    assert f"{task.name}-" not in names, "nothing is left in the queue"


LAUNCHER = """
import signal, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
signal.signal(signal.SIGTERM, lambda number, frame: child.send_signal(number))
while True:
    try:
        code = child.wait()
        break
    except InterruptedError:
        pass
sys.exit(1 if code else 0)
"""


def _preempt(lab, task):
    until("steps", lambda: len(task.steps()) > 10, 60)
    partition = lab.slurm.command("squeue", "-h", "-o", "%P", f"--name={_name(lab, task)}", user="root").stdout.strip()
    lab.sbatch(f"--partition={partition}", "--qos=inference", "--nodes=2", "--gres=gpu:4", "--time=10", wrap="sleep 10")


@scenario(["/usr/bin/python3", "-c", LAUNCHER, *TRAINER, "--steps", "60", "--on-notice", "85"], meanwhile=_preempt)
def test_a_launcher_that_turns_exit_codes_into_1_is_a_checkpointed_stop(outcome):
    result, task, _ = outcome
    assert result["state"] == "success", task.log()[-4000:]
    assert [attempt["ended_by"] for attempt in result["record"]["attempts"]] == ["preempted", "completed"]
    assert result["record"]["attempts"][0]["exit_code"] == 1
    assert [step for _, step, _ in task.steps()] == list(range(1, 61))


SHOW = """
import json, os
names = ["HOME", "USER", "LOGNAME", "PATH", "SLURM_CONF", "ODD", "EMPTY", "SBATCH_ACCOUNT", "SLURM_PARTITION", "PROFSCHED_PROFILE",
         "PROFSCHED_ATTEMPT", "PROFSCHED_RESUME_FROM", "PROFSCHED_NOTICE_S", "PROFSCHED_CHECKPOINT_INTERVAL_S", "CUDA_VISIBLE_DEVICES"]
json.dump({name: os.environ.get(name) for name in names}, open(os.environ["PROFSCHED_RESULT"], "w"))
"""
ODD = "a 'quoted' \"double\" $HOME `id` \\ back\nnew\tline ü €"


@scenario(["/usr/bin/python3", "-c", SHOW], env={"ODD": ODD, "EMPTY": ""}, resources={"gpus": 2, "cpus": 1})
def test_the_environment_arrives_as_it_was_given(outcome):
    result, task, lab = outcome
    seen = result["result"]
    assert seen["ODD"] == ODD
    assert seen["EMPTY"] == ""
    assert (seen["HOME"], seen["USER"], seen["LOGNAME"]) == ("/var/lib/profsched", "profsched", "profsched")
    assert "/usr/bin" in seen["PATH"].split(":")
    assert seen["SLURM_CONF"] == lab.slurm.env()["SLURM_CONF"]
    assert seen["PROFSCHED_PROFILE"] == "training"
    assert seen["PROFSCHED_ATTEMPT"] == "1"
    assert seen["PROFSCHED_RESUME_FROM"] == ""
    assert seen["PROFSCHED_NOTICE_S"] == "10"
    assert len(seen["CUDA_VISIBLE_DEVICES"].split(",")) == 2
    assert not list(task.run_dir.glob("attempt-*/env.sh")), "the file of variables is deleted at the end"


@scenario(
    ["/usr/bin/python3", "-c", SHOW],
    lab_env={"SBATCH_ACCOUNT": "nosuch", "SBATCH_QOS": "nosuch", "SLURM_PARTITION": "nosuch"},
)
def test_the_workers_own_slurm_variables_do_not_reach_the_job(outcome):
    result, task, _ = outcome
    assert result["state"] == "success", task.log()[-3000:]
    assert result["result"]["SBATCH_ACCOUNT"] is None
    assert result["result"]["SLURM_PARTITION"] is None


RANKS = """
import json, os, time
names = ["PET_NNODES", "PET_NODE_RANK", "PET_NPROC_PER_NODE", "PET_MASTER_ADDR", "PET_MASTER_PORT", "MASTER_ADDR", "MASTER_PORT",
         "NODE_RANK", "NNODES", "SLURM_PROCID"]
place = os.path.join(os.path.dirname(os.environ["PROFSCHED_RESULT"]), "seen-" + os.environ["SLURM_PROCID"])
json.dump({name: os.environ.get(name) for name in names}, open(place, "w"))
"""


@scenario(["/usr/bin/python3", "-c", RANKS], resources={"nodes": 2, "gpus": 4, "cpus": 1})
def test_a_gang_of_two_nodes_knows_its_ranks(outcome):
    result, task, _ = outcome
    assert result["state"] == "success", task.log()[-3000:]
    seen = [json.loads((task.run_dir / "attempt-1" / f"seen-{rank}").read_text()) for rank in (0, 1)]
    assert [one["NODE_RANK"] for one in seen] == ["0", "1"]
    assert [one["PET_NODE_RANK"] for one in seen] == ["0", "1"]
    assert {(one["NNODES"], one["PET_NNODES"], one["PET_NPROC_PER_NODE"]) for one in seen} == {("2", "2", "4")}
    assert len({(one["MASTER_ADDR"], one["MASTER_PORT"]) for one in seen}) == 1


@scenario(["sleep", "300"], execution_timeout=8, seconds=120)
def test_execution_timeout_cancels_the_job_while_the_task_is_deferred(outcome):
    result, task, lab = outcome
    assert result["state"] == "failed"
    assert "deadline has passed" in task.log()
    job = result["record"]["job_id"]
    until("the job's end", lambda: lab.accounted(job)[job]["state"].startswith("CANCELLED"), 60)
