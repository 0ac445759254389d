"""One question for all who wait; notes, critical moments and errors reach whom they concern, and nobody hangs."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from airflow_profsched.cluster.poller import DETAILS_EVERY, Agenda, Mailbox, Poller, Sighting, Waiter, critical
from airflow_profsched.core.errors import ClusterUnavailableError
from airflow_profsched.core.jobs import EndCause, JobRef, JobSnapshot, JobState

NEVER_S = 3600.0
TICK_S = 0.01


def waiter(number, suffix=""):
    return Waiter(JobRef(str(number), f"name-{number}"), f"name-{number}-1{suffix}")


def running(job_id):
    return JobSnapshot(job_id, JobState.RUNNING, raw="RUNNING")


@dataclass
class Cluster:
    """The transport: knows every job, remembers what it was asked, and fails as often as it is told to."""

    errors: list[Exception] = field(default_factory=list)
    asked: list[tuple[set[str], set[str]]] = field(default_factory=list)
    unknown: set[str] = field(default_factory=set)

    async def ask(self, refs, details):
        self.asked.append(({ref.job_id for ref in refs}, {ref.job_id for ref in details}))
        await asyncio.sleep(0)
        if self.errors:
            raise self.errors.pop(0)
        return {ref.job_id: running(ref.job_id) for ref in refs if ref.job_id not in self.unknown}


@dataclass
class Box:
    """The directory's two transports."""

    notes: dict[str, set[str]] = field(default_factory=dict)
    cleared: list[dict[str, set[str]]] = field(default_factory=list)
    looks: int = 0

    async def listing(self):
        self.looks += 1
        await asyncio.sleep(0)
        return {note: set(events) for note, events in self.notes.items()}

    async def clear(self, notes):
        await asyncio.sleep(0)
        self.cleared.append({note: set(events) for note, events in notes.items()})
        for note, events in notes.items():
            self.notes[note] -= set(events)
        self.notes = {note: events for note, events in self.notes.items() if events}


def poller(cluster, *, interval_s=NEVER_S, box=None):
    mailbox = None if box is None else Mailbox(box.listing, box.clear)
    return Poller(cluster.ask, interval_s, mailbox, TICK_S)


def run(scenario):
    """Run a scenario in a loop of its own; what hangs fails, long after it should have come."""
    return asyncio.run(asyncio.wait_for(scenario(), 30))


async def everybody(shared, waiters):
    return await asyncio.gather(*(shared.next(each) for each in waiters))


async def until(condition):
    for _ in range(100_000):
        if condition():
            return
        await asyncio.sleep(TICK_S / 10)


def test_a_thousand_waiters_cost_one_question():
    cluster, waiters = Cluster(), [waiter(number) for number in range(1000)]

    async def scenario():
        return await everybody(poller(cluster), waiters)

    seen = run(scenario)
    assert [sighting.job for sighting in seen] == [running(str(number)) for number in range(1000)]
    everyone = {str(number) for number in range(1000)}
    assert cluster.asked == [(everyone, everyone)]  # first seen: in detail


def test_each_interval_brings_one_more_question_about_everybody():
    cluster, waiters = Cluster(), [waiter(number) for number in range(20)]

    async def scenario():
        shared = poller(cluster, interval_s=TICK_S)
        for _ in range(3):
            await everybody(shared, waiters)

    run(scenario)
    everyone = {str(number) for number in range(20)}
    assert cluster.asked[:3] == [(everyone, everyone), (everyone, set()), (everyone, set())]


def test_a_job_that_the_cluster_does_not_know_is_told_so():
    cluster = Cluster(unknown={"2"})

    async def scenario():
        return await everybody(poller(cluster), [waiter(1), waiter(2)])

    assert run(scenario) == [Sighting(running("1")), Sighting(None)]


def test_while_nothing_happens_only_the_mailbox_is_looked_into():
    cluster, box = Cluster(), Box()

    async def scenario():
        shared = poller(cluster, box=box)
        await shared.next(waiter(1))
        await until(lambda: box.looks > 3)

    run(scenario)
    assert len(cluster.asked) == 1


def test_a_note_leads_to_a_question_about_the_named_one_only_and_is_cleared_after_the_answer():
    cluster, box = Cluster(), Box()
    waiters = [waiter(number) for number in range(5)]

    async def scenario():
        shared = poller(cluster, box=box)
        await everybody(shared, waiters)
        rest = [asyncio.create_task(shared.next(each)) for each in waiters if each is not waiters[3]]
        named = asyncio.create_task(shared.next(waiters[3]))
        box.notes = {"name-3-1": {"notice", "end"}, "a-strangers-1": {"end"}}
        seen = await named
        await until(lambda: box.cleared)
        assert not any(task.done() for task in rest)
        for task in rest:
            task.cancel()
        return seen

    assert run(scenario) == Sighting(running("3"), frozenset({"notice", "end"}))
    assert cluster.asked[1:] == [({"3"}, {"3"})]
    assert box.cleared == [{"name-3-1": {"notice", "end"}}]
    assert box.notes == {"a-strangers-1": {"end"}}


def test_a_note_outlives_a_question_that_got_no_answer():
    cluster, box, one = Cluster(), Box(), waiter(1)

    async def scenario():
        shared = poller(cluster, box=box)
        await shared.next(one)
        cluster.errors.append(ClusterUnavailableError("down"))
        box.notes = {"name-1-1": {"end"}}
        failed = await shared.next(one)
        assert isinstance(failed.error, ClusterUnavailableError)
        assert box.cleared == []
        return await shared.next(one)

    assert run(scenario).notes == {"end"}


def test_a_note_that_comes_while_its_waiter_is_busy_is_kept_for_it():
    cluster, box, one = Cluster(), Box(), waiter(1)

    async def scenario():
        shared = poller(cluster, box=box)
        await shared.next(one)
        for event in ("notice", "end"):  # the waiter looks and decides meanwhile, and waits for nothing
            box.notes = {"name-1-1": {event}}
            await until(lambda: not box.notes)
        cluster.errors = [ClusterUnavailableError("down")] * 100_000
        box.notes = {"name-1-1": {"start"}}
        asked = len(cluster.asked)
        await until(lambda: len(cluster.asked) > asked + 1)  # an error will be met again: it replaces nothing
        kept = await shared.next(one)
        cluster.errors = []
        return kept, await shared.next(one)

    kept, seen = run(scenario)
    assert kept == Sighting(running("1"), frozenset({"notice", "end"}))
    assert seen == Sighting(running("1"), frozenset({"start"}))


@pytest.mark.parametrize("box", [None, Box()])
def test_a_job_in_a_critical_moment_is_asked_about_at_every_tick_and_in_detail(box):
    cluster, calm, hot = Cluster(), waiter(1), waiter(2)

    async def scenario():
        shared = poller(cluster, box=box)
        await everybody(shared, [calm, hot])
        resting = asyncio.create_task(shared.next(calm))
        for _ in range(3):
            await shared.next(hot, soon=True)
        assert not resting.done()
        resting.cancel()

    run(scenario)
    assert cluster.asked[1:4] == [({"2"}, {"2"})] * 3


@pytest.mark.parametrize("error", [ClusterUnavailableError("down"), OSError("fork"), ValueError("unreadable")])
def test_an_error_reaches_every_waiter_and_the_next_question_is_asked_all_the_same(error):
    cluster, waiters = Cluster([error]), [waiter(number) for number in range(50)]

    async def scenario():
        shared = poller(cluster, interval_s=TICK_S)
        return await everybody(shared, waiters), await everybody(shared, waiters)

    failed, seen = run(scenario)
    assert {id(sighting.error) for sighting in failed} == {id(error)}
    assert all(sighting.error is None for sighting in seen)
    everyone = {str(number) for number in range(50)}
    assert cluster.asked[1] == (everyone, everyone)  # the details are still wanted


def test_a_mailbox_that_fails_is_an_error_too_and_no_end_of_the_waiting():
    class Broken(Box):
        async def listing(self):
            raise OSError("stale")

    async def scenario():
        shared = poller(Cluster(), box=Broken())
        seen = await shared.next(waiter(1))
        assert shared.waiters
        return seen

    assert isinstance(run(scenario).error, OSError)


def test_two_who_wait_for_one_job_are_both_answered_by_one_question():
    cluster, box = Cluster(), Box({"name-1-1": {"start"}})

    async def scenario():
        return await everybody(poller(cluster, box=box), [waiter(1), waiter(1), waiter(1, "b")])

    first, second, third = run(scenario)
    assert first == second == Sighting(running("1"), frozenset({"start"}))
    assert third == Sighting(running("1"))
    assert len(cluster.asked) == 1


def test_a_waiter_that_is_cancelled_leaves_and_is_asked_about_no_more():
    cluster, stays, goes = Cluster(), waiter(1), waiter(2)

    async def scenario():
        shared = poller(cluster, interval_s=TICK_S)
        await everybody(shared, [stays, goes])
        task = asyncio.create_task(shared.next(goes))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert shared.waiters == (stays,)
        asked = len(cluster.asked)
        await until(lambda: len(cluster.asked) > asked)
        return cluster.asked[-1][0]

    assert run(scenario) == {"1"}


def test_who_leaves_while_the_question_is_asked_is_not_told():
    gone = waiter(2)

    async def scenario():
        shared = poller(Cluster(), interval_s=TICK_S)
        ask = shared.ask

        async def leave_meanwhile(refs, details):
            shared.leave(gone)
            return await ask(refs, details)

        shared.ask = leave_meanwhile
        other = asyncio.create_task(shared.next(gone))
        seen = await shared.next(waiter(1))
        await asyncio.sleep(0)
        assert not other.done()
        other.cancel()
        return seen

    assert run(scenario) == Sighting(running("1"))


def test_the_task_ends_with_the_last_waiter_and_starts_again_with_the_next():
    cluster, one, other = Cluster(), waiter(1), waiter(2)

    async def scenario():
        shared = poller(cluster, interval_s=TICK_S)
        await everybody(shared, [one, other])
        first = shared._task
        shared.leave(one)
        shared.leave(one)  # leaving twice is no error
        assert not first.done()
        shared.leave(other)
        await first
        assert shared.waiters == ()
        seen = await shared.next(one)
        assert shared._task is not first
        return seen

    assert run(scenario) == Sighting(running("1"))


# ------------------------------------------------------------------------------------ the rules, without a clock


def jobs(answer):
    return tuple({ref.job_id for ref in refs} for refs in answer)


def test_details_are_asked_at_the_first_sighting_and_at_every_20th_interval():
    agenda, waiting = Agenda(30.0), [waiter(1)]
    detailed = [bool(jobs(agenda.due(30.0 * number, waiting, (), {}))[1]) for number in range(60)]
    assert [number + 1 for number, asked in enumerate(detailed) if asked] == [1, DETAILS_EVERY, 2 * DETAILS_EVERY, 60]


def test_between_two_intervals_only_the_named_and_the_critical_are_asked_about():
    agenda, waiting = Agenda(30.0), [waiter(number) for number in range(4)]
    agenda.due(0.0, waiting, (), {})
    assert jobs(agenda.due(2.0, waiting, (), {})) == (set(), set())
    assert jobs(agenda.due(29.9, waiting, {"2"}, {"name-1-1": {"end"}})) == ({"1", "2"}, {"1", "2"})
    assert jobs(agenda.due(30.0, waiting, (), {"name-1-1": {"end"}})) == ({"0", "1", "2", "3"}, {"1"})


def test_who_comes_later_is_asked_about_with_everybody_and_in_detail():
    agenda = Agenda(30.0)
    agenda.due(0.0, [waiter(1)], (), {})
    both = [waiter(1), waiter(2)]
    assert jobs(agenda.due(2.0, both, (), {})) == (set(), set())
    assert jobs(agenda.due(30.0, both, (), {})) == ({"1", "2"}, {"2"})


def test_who_is_forgotten_or_got_no_answer_is_seen_for_the_first_time_again():
    agenda, waiting = Agenda(30.0), [waiter(1), waiter(2)]
    agenda.due(0.0, waiting, (), {})
    agenda.forget("1")
    assert jobs(agenda.due(30.0, waiting, (), {}))[1] == {"1"}
    agenda.unanswered()
    assert jobs(agenda.due(60.0, waiting, (), {}))[1] == {"1", "2"}


@pytest.mark.parametrize(
    ("job", "notes", "expected"),
    [
        (None, (), True),
        (JobSnapshot("1", JobState.FAILED, EndCause.PREEMPTED), (), True),
        (JobSnapshot("1", JobState.RUNNING, preempt_s=5.0), (), True),
        (JobSnapshot("1", JobState.RUNNING, raw="COMPLETING"), (), True),
        (running("1"), ("notice",), True),
        (running("1"), ("end",), True),
        (running("1"), ("start",), False),
        (running("1"), (), False),
        (JobSnapshot("1", JobState.QUEUED, raw="PENDING"), (), False),
    ],
)
def test_a_moment_is_critical_between_a_sign_of_the_end_and_the_end(job, notes, expected):
    assert critical(job, notes) is expected
