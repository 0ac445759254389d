"""What becomes of a training that is preempted, on the real Slurm and through real triggers.

The evidence is accounting and the training's own step log, never our own counters alone.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest

from throwaway.lab import until

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(900)]


@dataclasses.dataclass
class Outcome:
    """What a scenario left."""

    result: dict
    steps: list
    jobs: list
    inference: dict
    log: str
    run_dir: object
    calls: list

    @property
    def attempts(self):
        return self.result["record"]["attempts"]

    @property
    def numbers(self):
        return [step for _, step, _ in self.steps]


def training(
    lab, slot, *options, profile="training", nodes=1, gpus=4, steps=60, operator="TrainingOperator", **arguments
):
    """Start a training in a slot."""
    command = ["/usr/bin/python3", f"{lab.home}/trainer.py", "--steps", str(steps), *options]
    return lab.task(
        operator,
        {
            "command": command,
            "profile": profile,
            "cluster": slot,
            "resources": {"nodes": nodes, "gpus": gpus, "cpus": 1},
            "deferrable": True,
            "retries": 0,
            **arguments,
        },
    )


def take_the_gpus(lab, slot, nodes=1, seconds=10):
    """An inference job that needs what the training holds."""
    options = [f"--partition={slot}", "--qos=inference", f"--nodes={nodes}", "--gres=gpu:4", "--time=10"]
    return lab.sbatch(*options, wrap=f"sleep {seconds}")


def preempted(lab, slot, *options, nodes=1, after=12, times=1, seconds=10, **arguments):
    """A training that an inference preempts so many times; every training here holds both nodes' GPUs that it needs."""
    blocker = None
    if nodes == 1:  # the slot's second node is taken, or Slurm would start the inference there
        blocker = lab.sbatch(f"--partition={slot}", "--qos=inference", "--gres=gpu:4", "--time=60", wrap="sleep 3000")
    task = training(lab, slot, *options, nodes=nodes, **arguments)
    jobs = []
    try:
        for number in range(times):
            before = len(task.steps())
            until(
                "steps",
                lambda before=before: len(task.steps()) >= before + after or task.process.poll() is not None,
                90,
            )
            jobs.append(take_the_gpus(lab, slot, nodes, seconds))
            if number + 1 < times:
                until("the inference's end", lambda: lab.accounted(jobs[-1]).get(jobs[-1], {}).get("end"), 90)
        result = task.wait(240)
    finally:
        if blocker:
            lab.slurm.command("scancel", blocker)
    record = result["record"] or {"attempts": []}
    rows = lab.accounted(*(attempt["job_id"] for attempt in record["attempts"]), *jobs)
    mine = [rows[attempt["job_id"]] for attempt in record["attempts"]]
    return Outcome(result, task.steps(), mine, rows.get(jobs[0], {}), task.log(), task.run_dir, task.calls())


def came_back(outcome, grace_s=10, last=60):
    """What holds in every case of one preemption."""
    assert outcome.result["state"] == "success", outcome.log[-5000:]
    assert outcome.result["try_number"] == 1
    assert len(outcome.jobs) == 2, "one job per attempt"
    assert [attempt["ended_by"] for attempt in outcome.attempts] == ["preempted", "completed"]
    assert outcome.result["record"]["preemptions"] == 1
    assert outcome.calls == ["preempted work", "resumed work"]
    assert outcome.numbers[-1] == last, "a success without the last step"
    assert outcome.jobs[1]["start"] - outcome.inference["end"] <= 5, "running again within 5 s of the room"
    assert outcome.inference["start"] - outcome.inference["submit"] <= grace_s + 3
    assert outcome.jobs[0]["end"] <= outcome.jobs[1]["start"], "two live jobs of one task"


def scenario(*options, **arguments):
    return pytest.mark.scenario(functools.partial(_scenario, options=options, arguments=arguments))


def _scenario(lab, slot, options, arguments):
    return preempted(lab, slot, *options, **arguments)


CASES = {
    "exit 0": scenario("--on-notice", "0"),
    "exit 85": scenario("--on-notice", "85"),
    "exit 143": scenario("--on-notice", "143"),
    "exit 1 with a new checkpoint": scenario("--on-notice", "1"),
    "GraceTime 0": scenario("--on-notice", "0", profile="at_once"),
    "PreemptMode CANCEL": scenario("--on-notice", "0", profile="cancelled"),
    "waiting in the worker": scenario("--on-notice", "0", deferrable=False),
}


@pytest.mark.parametrize("how", [pytest.param(how, marks=mark) for how, mark in CASES.items()])
def test_a_training_that_saves_goes_on_where_it_was(how, outcome):
    came_back(outcome, grace_s=30 if how == "GraceTime 0" else 10)
    assert outcome.numbers == list(range(1, 61)), "a step lost after the checkpoint, or repeated before it"
    assert outcome.attempts[0]["step"] == outcome.attempts[1]["start_step"]


@scenario("--on-notice", "ignore", "--every", "5", steps=150)
def test_a_training_that_ignores_the_signal_is_ended_at_the_end_of_its_grace_time(outcome):
    came_back(outcome, last=150)
    first = [step for attempt, step, _ in outcome.steps if attempt == 1]
    second = [step for attempt, step, _ in outcome.steps if attempt == 2]
    assert first == list(range(1, first[-1] + 1))
    assert second == list(range(outcome.attempts[1]["start_step"] + 1, 151)), "goes on behind the older checkpoint"
    assert first[-1] - outcome.attempts[1]["start_step"] < 5, "the newest complete checkpoint"


@scenario("--on-notice", "85", "--every", "0", steps=120, times=6, after=6, seconds=3)
def test_six_preemptions_in_a_row(outcome):
    assert outcome.result["state"] == "success", outcome.log[-5000:]
    assert outcome.result["try_number"] == 1
    assert [attempt["ended_by"] for attempt in outcome.attempts] == ["preempted"] * 6 + ["completed"]
    assert outcome.result["record"]["preemptions"] == 6
    assert outcome.numbers == list(range(1, 121))
    for before, after in zip(outcome.jobs, outcome.jobs[1:], strict=False):
        assert before["end"] <= after["start"], "two live jobs of one task"


@scenario("--on-notice", "85", "--save-per-rank", "2,40", profile="patient", nodes=2)
def test_ranks_that_save_do_not_cut_each_other_short(outcome):
    came_back(outcome, grace_s=60)
    assert (outcome.run_dir / "saved-rank-1").exists(), "the slow rank's save"
    assert outcome.numbers == list(range(1, 61))
    assert "attempt 1 rank 1 from step 0" in outcome.log
    assert f"attempt 2 rank 1 from step {outcome.attempts[1]['start_step']}" in outcome.log


@scenario("--on-notice", "nosave:1", "--every", "0", steps=61)
def test_a_training_that_never_saves_is_not_called_a_success(outcome):
    assert outcome.result["state"] == "success", outcome.log[-5000:]
    assert outcome.numbers[-1] == 61
    second = [step for attempt, step, _ in outcome.steps if attempt == 2]
    assert second == list(range(1, 62)), "it starts from the beginning"
