"""One question per cluster and interval for all who wait in an event loop.

Between two intervals the mailbox (a directory that the nodes share) tells which jobs are worth a question at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from airflow_profsched.core.jobs import JobRef, JobSnapshot

TICK_S = 2.0
"""How often the mailbox is listed and jobs in a critical moment are asked about."""

DETAILS_EVERY = 20
"""Every so many intervals all jobs are asked for their details."""

Answers = Mapping[str, JobSnapshot]
Ask = Callable[[Collection[JobRef], Collection[JobRef]], Awaitable[Answers]]
Listing = Mapping[str, Collection[str]]


@dataclass(frozen=True, slots=True, eq=False)
class Waiter:
    """Who waits: a job, and the name under which its node leaves notes. Two who wait for one job are two.

    Args:
        ref: the job.
        note: its mailbox name, :attr:`JobKey.name`.
    """

    ref: JobRef
    note: str


@dataclass(frozen=True, slots=True)
class Sighting:
    """One answer for one waiter.

    Args:
        job: what the cluster said; None where it does not know the job.
        notes: the events that the mailbox named (`start`, `notice`, `end`).
        error: why the cluster gave no answer; nothing may be concluded then.
    """

    job: JobSnapshot | None = None
    notes: frozenset[str] = frozenset()
    error: Exception | None = None


class Agenda:
    """When to ask about whom: the rules that the blocking loop and the shared poller have in common; no I/O.

    Args:
        interval_s: seconds between two questions about everybody.
    """

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self._next_full_s = 0.0
        self._fulls = 0
        self._detailed: set[str] = set()
        self._asked: set[str] = set()

    def due(
        self, now_s: float, waiting: Collection[Waiter], soon: Collection[str], notes: Listing
    ) -> tuple[list[JobRef], list[JobRef]]:
        """Say about whom to ask now, and about whom in detail.

        Args:
            now_s: seconds of a monotonic clock.
            waiting: everybody.
            soon: job ids in a critical moment.
            notes: what the mailbox named, by note.

        Returns:
            The jobs to ask about; those of them whose details are wanted.
        """
        every = now_s >= self._next_full_s
        if every:
            self._next_full_s = now_s + self.interval_s
            self._fulls += 1
            if self._fulls % DETAILS_EVERY == 0:
                self._detailed.clear()
        urgent = {w.ref.job_id: w.ref for w in waiting if w.note in notes or w.ref.job_id in soon}
        named = {w.ref.job_id: w.ref for w in waiting} if every else urgent
        first = {job_id: ref for job_id, ref in named.items() if job_id not in self._detailed}
        self._asked = set(named)
        self._detailed |= self._asked
        return list(named.values()), list((urgent | first).values())

    def unanswered(self) -> None:
        """Note that the last question got no answer: the details are still wanted, at the next one."""
        self._detailed -= self._asked

    def forget(self, job_id: str) -> None:
        """Drop what is remembered of a job."""
        self._detailed.discard(job_id)


@dataclass(slots=True)
class _Entry:
    future: asyncio.Future[Sighting]
    soon: bool = False
    missed: Sighting | None = None
    """What came while the waiter was busy with the sighting before; its notes are cleared and come only once."""


@dataclass(frozen=True, slots=True)
class Mailbox:
    """The two things that are done with the mailbox; both touch the file system, so both are awaited.

    Args:
        listing: lists the events by note.
        clear: removes the notes that have been acted upon.
    """

    listing: Callable[[], Awaitable[Listing]]
    clear: Callable[[Mapping[str, Collection[str]]], Awaitable[None]]


@dataclass(slots=True)
class Poller:
    """The shared poller of one cluster in one event loop. Its task starts with the first waiter and ends with the last.

    Args:
        ask: one batched question.
        interval_s: seconds between two questions about everybody.
        mailbox: where nodes leave notes; None where Airflow does not share their file system.
        tick_s: seconds between two looks into the mailbox.
    """

    ask: Ask
    interval_s: float
    mailbox: Mailbox | None = None
    tick_s: float = TICK_S
    _entries: dict[Waiter, _Entry] = field(default_factory=dict)
    _task: asyncio.Task[None] | None = None
    _agenda: Agenda = field(init=False)

    def __post_init__(self) -> None:
        """Start with an empty agenda."""
        self._agenda = Agenda(self.interval_s)

    async def next(self, waiter: Waiter, *, soon: bool = False) -> Sighting:
        """Wait for the next answer about one job.

        Args:
            waiter: who waits.
            soon: whether the job is in a critical moment, so that it is asked about at every tick.

        Returns:
            What was seen. An answer that did not come is a sighting with an error, never an exception.
        """
        entry = self._entries.get(waiter)
        if entry is not None and entry.missed is not None:
            seen, entry.missed, entry.soon = entry.missed, None, soon
            return seen
        future: asyncio.Future[Sighting] = asyncio.get_running_loop().create_future()
        self._entries[waiter] = _Entry(future, soon)
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._poll())
        try:
            return await future
        except asyncio.CancelledError:
            self.leave(waiter)
            raise

    def leave(self, waiter: Waiter) -> None:
        """Stop waiting for a job: nobody is asked about it any more."""
        self._entries.pop(waiter, None)
        self._agenda.forget(waiter.ref.job_id)

    @property
    def waiters(self) -> tuple[Waiter, ...]:
        """Everybody who waits now."""
        return tuple(self._entries)

    async def _poll(self) -> None:
        while self._entries:
            try:
                await self._tick(time.monotonic())
            except Exception as error:  # noqa: BLE001 - the fan-out: every waiter has to learn of it, whatever it was
                self._agenda.unanswered()
                for waiter in self.waiters:
                    self._tell(waiter, Sighting(error=error))
            # A whole tick after the answer, however long that took: a slow cluster is not asked without a pause.
            await asyncio.sleep(min(self.tick_s, self.interval_s))

    async def _tick(self, now_s: float) -> None:
        listed = {} if self.mailbox is None else await self.mailbox.listing()
        waiting = self.waiters
        mine = {waiter.note for waiter in waiting}
        notes = {note: events for note, events in listed.items() if note in mine}
        soon = {waiter.ref.job_id for waiter, entry in self._entries.items() if entry.soon}
        refs, details = self._agenda.due(now_s, waiting, soon, notes)
        if not refs:
            return
        answers = await self.ask(refs, details)
        asked = {ref.job_id for ref in refs}
        for waiter in waiting:
            if waiter.ref.job_id in asked:
                self._tell(waiter, Sighting(answers.get(waiter.ref.job_id), frozenset(notes.get(waiter.note, ()))))
        if self.mailbox is not None and notes:  # only now: a note must outlive a question that got no answer
            await self.mailbox.clear(notes)

    def _tell(self, waiter: Waiter, seen: Sighting) -> None:
        entry = self._entries.get(waiter)
        if entry is None:
            return
        if not entry.future.done():
            entry.future.set_result(seen)
        elif seen.error is None:
            before = entry.missed.notes if entry.missed is not None else frozenset()
            entry.missed = replace(seen, notes=seen.notes | before)


def critical(job: JobSnapshot | None, notes: Collection[str]) -> bool:
    """Whether a job is in a moment in which it is asked about at every tick.

    Args:
        job: what was seen last.
        notes: what its node has noted.

    Returns:
        True between a sign of its end or preemption and that end.
    """
    if job is None or job.state.ended:
        return True
    return job.preempt_s is not None or "COMPLETING" in job.raw or bool({"notice", "end"} & set(notes))
