"""Whatever is seen, in any order: the machine ends or keeps watching, and breaks no promise (design §2, §6)."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from airflow_profsched.core.evidence import CheckpointView, EndMarker, Findings
from airflow_profsched.core.jobs import EndCause, Granted, JobSnapshot, JobState, TaskKey
from airflow_profsched.core.lifecycle import (
    Cancel,
    Fail,
    Nudge,
    Observation,
    Rules,
    StopAttempt,
    Submit,
    Succeed,
    Watch,
    advance,
)
from airflow_profsched.core.run import Phase, Run, submitting, watching

RANKS, START_S = 2, 10_000.0
STEPS = st.none() | st.integers(0, 3)
TIMES = st.none() | st.floats(START_S - 500, START_S + 5000)

MARKERS = st.builds(
    EndMarker,
    rank=st.integers(-1, RANKS),
    ranks=st.just(RANKS),
    nonce=st.sampled_from(["own", "own", "own", "other"]),
    job_id=st.sampled_from(["own", "own", "own", "other"]),
    restart=st.integers(0, 1),
    exit_code=st.sampled_from([0, 0, 1, 3, 85, 137, 143]),
    ended_s=st.floats(START_S, START_S + 5000),
    notice_s=TIMES,
    done=st.booleans(),
    start_step=STEPS,
    step=STEPS,
)
ALL_DONE = st.just(tuple(EndMarker(rank, RANKS, "own", "own", 0, 0, START_S, done=True) for rank in range(RANKS)))
LOOKS = st.builds(
    Findings,
    markers=st.lists(MARKERS, max_size=4).map(tuple) | ALL_DONE,
    plain=st.booleans(),
    checkpoint=st.builds(CheckpointView, visible=st.just(value=True), step=STEPS)
    | st.just(CheckpointView(visible=False)),
)
CAUSES = st.none() | st.sampled_from(EndCause)
SNAPSHOTS = st.builds(
    JobSnapshot,
    job_id=st.just("own"),
    state=st.sampled_from(JobState),
    cause=CAUSES,
    exit_code=st.sampled_from([None, 0, 0, 3, 85]),
    restarts=st.integers(0, 1),
    reason=st.sampled_from(["", "BeginTime", "Priority"]),
    start_s=TIMES,
    end_s=TIMES,
    preempt_s=st.none() | TIMES,
    granted=st.builds(Granted, time_limit_s=st.none() | st.just(3600), nodes=st.sampled_from(["", "n1", "n[1-2]"])),
    detailed=st.booleans(),
).map(lambda job: job if job.state.ended else replace(job, cause=None))
OBSERVATIONS = st.builds(
    Observation,
    now_s=st.sampled_from([0.0, 2.0, 30.0, 61.0, 301.0]),  # since the one before
    job=st.none() | SNAPSHOTS,
    found=st.none() | LOOKS,
    hopeless=st.sampled_from(["", "", "", "", "InvalidQOS"]),
)
RULES = st.builds(
    Rules,
    cluster=st.just("dgx"),
    checkpointed=st.booleans(),
    ranks=st.just(RANKS),
    without_progress=st.integers(0, 2),
    unproven=st.integers(0, 2),
    walltime_notice_s=st.sampled_from([None, 120.0]),
    deadline_s=st.sampled_from([None, None, START_S + 2000]),
)


@dataclass
class World:
    """The roof as the machine sees it: it keeps the run as JSON, and submits whenever the machine says so."""

    rules: Rules
    adopts: bool = False
    run: Run = field(default=Run(TaskKey("dag", "run", "train")))
    now_s: float = START_S
    stale: int = 0
    unseen: int = 0
    stops: int = 0

    def own(self, found):
        """Make what was drawn as `own` this attempt's."""
        if found is None:
            return None
        job_id, nonce = {"own": self.run.job_id}, {"own": self.run.nonce}
        mine = (replace(m, job_id=job_id.get(m.job_id, "9"), nonce=nonce.get(m.nonce, "x")) for m in found.markers)
        return replace(found, markers=tuple(mine))

    def see(self, drawn):
        """Take one step, and hold the machine to what it has promised."""
        self.now_s += drawn.now_s
        seen = replace(drawn, now_s=self.now_s, found=self.own(drawn.found))
        before = self.run
        after, action = advance(before, seen, self.rules)
        self.keep(after)
        event(type(action).__name__)
        self.check_promises(before, seen, action)
        return action

    def keep(self, run):
        self.run = Run.from_json(json.loads(json.dumps(run.to_json())))
        assert self.run == run

    def check_promises(self, before, seen, action):
        ended = before.phase is Phase.WATCHING and len(self.run.history) > len(before.history)
        if ended or isinstance(action, Submit):
            alive = seen.job is not None and not seen.job.state.ended
            assert not (alive and before.phase is Phase.WATCHING and not isinstance(action, (Succeed, Fail)))
        if ended and self.run.phase is Phase.WAITING:
            self.check_budgets(before, seen)
        if isinstance(action, Succeed):
            assert proves_success(before, seen)
        if isinstance(action, (StopAttempt, Nudge)):
            assert not seen.job.state.ended
        if isinstance(action, StopAttempt):
            self.stops += 1
            assert self.stops == 1
        if isinstance(action, (Succeed, Fail, Cancel)):
            assert self.run.phase is Phase.DONE
            assert self.run.outcome

    def check_budgets(self, before, seen):
        """Count again, in another way: what was resumed without a newer checkpoint in a row."""
        cause = self.run.history[-1].cause
        if cause == EndCause.CANCELLED:  # of an adopted job
            assert before.adopted
            return
        chosen = {}  # where two files claim one rank, the one that proves less is believed
        for m in of_newest_start(before, seen):
            other = chosen.get(m.rank)
            if other is None or (m.done, m.ended_s) <= (other.done, other.ended_s):
                chosen[m.rank] = m
        steps = [m.step for m in chosen.values() if m.step is not None]
        look = seen.found.checkpoint if seen.found is not None else CheckpointView(visible=False)
        steps += [look.step] if look.step is not None else []
        newer = bool(steps) and max(steps) > before.start_step
        visible = look.visible or bool(steps)
        if not self.rules.checkpointed or (visible and not newer):
            self.stale += 1
        elif newer:
            self.stale = self.unseen = 0
        else:
            self.unseen += 1
        assert self.stale <= self.rules.without_progress
        assert self.unseen <= self.rules.unproven
        assert cause != EndCause.TIMEOUT or (self.rules.checkpointed and (newer or not visible))

    def submit(self, start_step):
        """Do what the roof does, through the store at every step."""
        number = self.run.attempt + 1
        self.keep(submitting(self.run, number, f"nonce-{number}", self.now_s, start_step))
        self.keep(watching(self.run, f"job-{number}", adopted=self.adopts))
        self.stops = 0


def of_newest_start(run, seen):
    known = max(run.restarts, seen.job.restarts if seen.job is not None and seen.job.detailed else 0)
    markers = () if seen.found is None else seen.found.markers
    mine = [m for m in markers if (m.nonce, m.job_id) == (run.nonce, run.job_id) and 0 <= m.rank < RANKS]
    newest = max([known, *(m.restart for m in mine)])
    return [m for m in mine if m.restart == newest]


def proves_success(run, seen):
    mine = of_newest_start(run, seen)
    declared = {m.rank for m in mine} == set(range(RANKS)) and all(m.done for m in mine)
    job = seen.job
    plainly = seen.found.plain and job is not None and (job.cause, job.exit_code) == (EndCause.COMPLETED, 0)
    return declared or plainly


def play(world, drawn, steps):
    """Let the machine see a sequence; return its last action, and the last thing it saw."""
    action = Submit()
    for observation, step in zip(drawn, steps, strict=False):
        if isinstance(action, Submit):
            world.submit(step)
        action = world.see(observation)
        if isinstance(action, (Succeed, Fail, Cancel)):
            return action
    return action


@settings(max_examples=600, deadline=None)
@given(RULES, st.booleans(), st.lists(st.tuples(OBSERVATIONS, st.integers(0, 2)), min_size=1, max_size=40))
def test_no_sequence_of_observations_breaks_a_promise(rules, adopts, drawn):
    world = World(rules, adopts)
    action = play(world, [seen for seen, _ in drawn], [step for _, step in drawn])
    if isinstance(action, (Succeed, Fail, Cancel)):
        again = advance(world.run, Observation(world.now_s, drawn[0][0].job, drawn[0][0].found), rules)
        assert again[0] == world.run
        assert isinstance(again[1], (Succeed, Fail))
    else:
        assert isinstance(action, (Watch, Submit, StopAttempt, Nudge))


ENDS = st.none() | SNAPSHOTS.filter(lambda job: job.state.ended).map(lambda job: replace(job, detailed=True))


@settings(max_examples=300, deadline=None)
@given(RULES, st.lists(OBSERVATIONS, min_size=1, max_size=10), ENDS, LOOKS)
def test_the_same_end_seen_for_long_enough_leads_to_a_decision(rules, drawn, last, found):
    world = World(rules)
    play(world, drawn, [1] * len(drawn))
    if world.run.phase is not Phase.WATCHING:
        return
    world.see(Observation(0.0, last, found))
    wait_s = rules.lost_s if last is None else rules.evidence_s
    if world.run.phase is Phase.WATCHING:
        world.see(Observation(wait_s, last, found))
    assert world.run.phase in (Phase.WAITING, Phase.DONE)


@settings(max_examples=100, deadline=None)
@given(RULES, st.lists(st.sampled_from([c for c in EndCause if c is not EndCause.CANCELLED]), min_size=1), STEPS)
def test_a_cluster_that_ends_every_attempt_without_progress_ends_the_task(rules, causes, step):
    """Nothing is resumed for ever: at most the budgets' sum of resumes follow when no checkpoint becomes newer."""
    world, action = World(rules), Submit()
    found = Findings(checkpoint=CheckpointView(visible=step is not None, step=step))
    for number in range(200):
        if isinstance(action, Submit):
            world.submit(step or 0)
        cause = causes[number % len(causes)]
        state = JobState.DONE if cause is EndCause.COMPLETED else JobState.FAILED
        action = world.see(Observation(601.0, JobSnapshot("own", state, cause), found))
        if isinstance(action, (Succeed, Fail, Cancel)):
            break
    else:
        pytest.fail("it went on for ever")
    assert world.run.attempt <= rules.without_progress + rules.unproven + 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.sampled_from([EndCause.PREEMPTED, EndCause.TIMEOUT, EndCause.NODE_FAIL]), max_size=60))
def test_whoever_makes_progress_may_be_preempted_for_ever(causes):
    world = World(Rules("dgx", checkpointed=True, ranks=RANKS))
    for number, cause in enumerate(causes):
        world.submit(number)
        found = Findings(checkpoint=CheckpointView(visible=True, step=number + 1))
        ended = JobSnapshot("own", JobState.FAILED, cause, start_s=START_S, end_s=START_S + 100)
        assert world.see(Observation(5.0, ended, found)) == Submit()
    assert world.run.preemptions == causes.count(EndCause.PREEMPTED)
