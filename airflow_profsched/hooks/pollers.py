"""The pollers of this process: one per event loop, cluster and interval, however many triggers wait."""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from airflow_profsched.cluster import mailbox
from airflow_profsched.cluster.exchange import arun
from airflow_profsched.cluster.poller import Answers, Mailbox, Poller, Waiter

if TYPE_CHECKING:
    from airflow_profsched.cluster.scheduler import Scheduler
    from airflow_profsched.cluster.transports import AsyncLocalSender
    from airflow_profsched.core.jobs import JobRef

WATCH_FILE_EVERY_S = 60.0

_POLLERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, ...], Poller]] = (
    weakref.WeakKeyDictionary()
)


@dataclass(frozen=True, slots=True)
class PollerKey:
    """What two triggers must have in common to share a poller.

    Args:
        conn_id: the connection.
        cluster: the policy's name of the cluster.
        work_dir: where its nodes leave notes.
        interval_s: seconds between two questions.
    """

    conn_id: str
    cluster: str
    work_dir: str
    interval_s: float


def shared_poller(key: PollerKey, scheduler: Scheduler, sender: AsyncLocalSender) -> Poller:
    """Return the running loop's poller for a cluster, made at the first call.

    Args:
        key: what it is shared by.
        scheduler: the cluster.
        sender: who carries its questions.

    Returns:
        The poller.
    """

    async def ask(refs: Collection[JobRef], details: Collection[JobRef]) -> Answers:
        return await arun(scheduler.query(refs, details), sender)

    pollers = _POLLERS.setdefault(asyncio.get_running_loop(), {})
    name = (key.conn_id, key.cluster, key.work_dir, str(key.interval_s))
    if name not in pollers:
        poller = Poller(ask, key.interval_s)
        poller.mailbox = _mailbox(key.work_dir, lambda: poller.waiters)
        pollers[name] = poller
    return pollers[name]


def _mailbox(work_dir: str, waiters: Callable[[], Collection[Waiter]]) -> Mailbox:
    written_s = 0.0

    async def listing() -> Mapping[str, Collection[str]]:
        nonlocal written_s
        if time.monotonic() - written_s >= WATCH_FILE_EVERY_S or not written_s:
            written_s = time.monotonic()
            names = [waiter.ref.name for waiter in waiters()]
            await asyncio.to_thread(mailbox.write_watch_file, work_dir, names)
        return await asyncio.to_thread(mailbox.list_mailbox, work_dir)

    async def clear(notes: Mapping[str, Collection[str]]) -> None:
        await asyncio.to_thread(mailbox.clear_notes, work_dir, notes)

    return Mailbox(listing, clear)
