"""One Slurm and one environment for all tests of this suite; every scenario has nodes and a partition of its own."""

from __future__ import annotations

import concurrent.futures
import os
import pathlib
import queue

import pytest

from throwaway import slurm as throwaway_slurm
from throwaway.lab import Lab
from throwaway.packages import Unavailable

PROGRAMS = pathlib.Path(__file__).parent / "programs"
SLOTS = 8
AT_ONCE = 4

GRACES = {
    "training": ("10", "REQUEUE"),
    "cancelled": ("10", "CANCEL"),
    "at_once": ("0", "REQUEUE"),
    "patient": ("60", "REQUEUE"),
}


def _options() -> throwaway_slurm.Options:
    qos = {
        name: {**throwaway_slurm.QOS["training"], "GraceTime": grace, "PreemptMode": mode}
        for name, (grace, mode) in GRACES.items()
    }
    qos["inference"] = {**throwaway_slurm.QOS["inference"], "Preempt": ",".join(GRACES)}
    qos["narrow"] = {"Priority": "100", "GrpTRES": "gres/gpu=2", "MaxWall": "00:05:00"}
    partitions = {f"s{slot}": f"n[{2 * slot - 1}-{2 * slot}]" for slot in range(1, SLOTS + 1)}
    return throwaway_slurm.Options(nodes=2 * SLOTS, qos=qos, partitions=partitions)


def _policy(slurm: throwaway_slurm.ThrowawaySlurm) -> str:
    lines = ["version: 1", "profiles:"]
    for name in GRACES:
        lines += [
            f"  {name}:",
            "    {gpus: {min: 1}, walltime: {default: 1h, max: 48h}, preemptible: true, grace: 120s, checkpoint: {required: true}}",
        ]
    for name in ("bad_qos", "bad_partition", "bad_constraint", "narrow", "narrow_wall"):
        lines += [f"  {name}:", "    {walltime: {default: 1h}}"]
    lines += ["clusters:"]
    for slot in range(1, SLOTS + 1):
        lines += [f"  s{slot}:", "    kind: slurm", f"    work_dir: {slurm.work_dir}", "    profiles:"]
        for name in (*GRACES, "inference"):
            lines += [f"      {name}: {{qos: {name}, partition: s{slot}}}"]
        lines += [
            f"      bad_qos: {{qos: nosuch, partition: s{slot}}}",
            "      bad_partition: {qos: training, partition: nosuch}",
            f"      bad_constraint: {{qos: training, partition: s{slot}, constraint: nosuch}}",
            f"      narrow: {{qos: narrow, partition: s{slot}}}",
            f"      narrow_wall: {{qos: narrow, partition: s{slot}}}",
        ]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def lab():
    """A real Slurm of many nodes, and tasks on it."""
    slurm = throwaway_slurm.ThrowawaySlurm(_options())
    try:
        slurm.up()
    except Unavailable as error:
        pytest.skip(f"no Slurm here: {error}")
    try:
        made = Lab(slurm).up()
        made.write_policy(_policy(slurm))
        for program in PROGRAMS.iterdir():
            made.put(program)
        yield made
    finally:
        if not os.environ.get("KEEP"):
            slurm.down()


class Pool:
    """Runs scenarios side by side, each in a slot (two nodes and a partition) of its own."""

    def __init__(self, lab):
        self.lab = lab
        self.slots = queue.Queue()
        for slot in range(1, SLOTS + 1):
            self.slots.put(f"s{slot}")
        self.workers = concurrent.futures.ThreadPoolExecutor(max_workers=AT_ONCE)
        self.futures = {}

    def start(self, name, scenario):
        if name not in self.futures:
            self.futures[name] = self.workers.submit(self._run, scenario)

    def _run(self, scenario):
        slot = self.slots.get()
        try:
            return scenario(self.lab, slot)
        finally:
            self.slots.put(slot)


@pytest.fixture(scope="session")
def pool(lab, request):
    """All scenarios of the selected tests, begun at once."""
    made = Pool(lab)
    for item in request.session.items:
        marker = item.get_closest_marker("scenario")
        if marker:
            made.start(item.nodeid, marker.args[0])
    yield made
    made.workers.shutdown(cancel_futures=True)


@pytest.fixture
def outcome(pool, request):
    """What came of this test's own scenario."""
    return pool.futures[request.node.nodeid].result(timeout=900)
