"""A site without slurmdbd: partitions take the place of QoS, and no QoS is named."""

from __future__ import annotations

import pathlib

import pytest

from throwaway.lab import Lab, until
from throwaway.packages import Unavailable
from throwaway.slurm import Options, ThrowawaySlurm

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

POLICY = """\
version: 1
clusters:
  here: {{kind: slurm, work_dir: {work_dir}, profiles: {{training: {{partition: train}}, inference: {{partition: infer}}}}}}
"""
TRAINER = pathlib.Path(__file__).parent / "programs" / "trainer.py"


def test_a_training_comes_back_by_partition_priority():
    slurm = ThrowawaySlurm(Options(nodes=1, accounting=False))
    try:
        slurm.up()
    except Unavailable as error:
        pytest.skip(f"no Slurm here: {error}")
    try:
        lab = Lab(slurm).up()
        lab.write_policy(POLICY.format(work_dir=slurm.work_dir))
        trainer = lab.put(TRAINER)
        arguments = {
            "command": ["/usr/bin/python3", str(trainer), "--steps", "60", "--on-notice", "0"],
            "resources": {"gpus": 4, "cpus": 1},
            "deferrable": True,
            "retries": 0,
        }
        task = lab.task("TrainingOperator", arguments)
        until("steps", lambda: len(task.steps()) > 10, 90)
        lab.sbatch("--partition=infer", "--gres=gpu:4", "--time=5", wrap="sleep 10")
        result = task.wait(180)
        assert result["state"] == "success", task.log()[-4000:]
        assert [attempt["ended_by"] for attempt in result["record"]["attempts"]] == ["preempted", "completed"]
        assert [step for _, step, _ in task.steps()] == list(range(1, 61))
        assert {attempt["partition"] for attempt in result["record"]["attempts"]} == {"train"}
    finally:
        slurm.down()
