"""The trigger that waits for a run: it asks the shared poller, takes the run's steps, and fires when there is work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import TYPE_CHECKING, Any

from airflow.triggers.base import BaseTrigger, TriggerEvent
from asgiref.sync import sync_to_async

from airflow_profsched import _compat
from airflow_profsched.cluster.exchange import arun
from airflow_profsched.cluster.poller import Poller, Sighting, Waiter, critical
from airflow_profsched.cluster.watch import past_deadline, reference, step
from airflow_profsched.core.errors import ClusterUnavailableError, ProfschedError
from airflow_profsched.core.lifecycle import Action, Cancel, Fail, Observation, Submit, Succeed, Watch, advance
from airflow_profsched.core.run import Phase, Run
from airflow_profsched.hooks.desk import Desk
from airflow_profsched.hooks.pollers import PollerKey, shared_poller
from airflow_profsched.hooks.slurm import async_sender

if TYPE_CHECKING:
    from airflow_profsched.cluster.transports import AsyncLocalSender

KEPT_STATE = "deferred"
"""The state in which the job is still wanted although the trigger ends: it moves to another triggerer."""


class WorkloadTrigger(BaseTrigger):
    """Waits for one run.

    Args:
        desk: :meth:`Desk.to_json`.
        run: :meth:`Run.to_json`.
        cancel_on_kill: whether the job is cancelled when a user ends the task.
    """

    def __init__(self, desk: dict[str, Any], run: dict[str, Any], *, cancel_on_kill: bool = True) -> None:
        super().__init__()
        self._desk_json, self._run_json = desk, run
        self._cancel_on_kill = cancel_on_kill
        self._fired = False

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """Return the class path and the arguments, plain JSON."""
        arguments = {"desk": self._desk_json, "run": self._run_json, "cancel_on_kill": self._cancel_on_kill}
        return f"{type(self).__module__}.{type(self).__qualname__}", arguments

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Wait until the run needs a worker.

        Yields:
            One event: the run, and what is to be done with it.
        """
        try:
            event = await self._wait()
        except (ProfschedError, OSError, ValueError, TypeError, KeyError) as error:
            # A trigger that raises spends a retry beside a job that runs on.
            event = {"action": "broken", "message": f"{type(error).__name__}: {error}", "run": self._run_json}
        self._fired = True
        yield TriggerEvent({**event, "desk": self._desk_json})

    async def _wait(self) -> dict[str, Any]:

        desk = await asyncio.to_thread(Desk.from_json, self._desk_json)
        vigil = Vigil(self, desk, await async_sender(desk.placement.conn_id))
        run, action = await vigil.keep(Run.from_json(self._run_json))
        return encode_event(run, action)

    async def on_kill(self) -> None:
        """Cancel the job when a user ended the task (Airflow 3.3 and later)."""
        await self._cancel_if_unwanted()

    async def cleanup(self) -> None:
        """Before Airflow 3.3 this is the only call at a kill, and it also comes when the trigger merely moves."""
        if not _compat.TRIGGER_ON_KILL:
            await self._cancel_if_unwanted()

    async def _cancel_if_unwanted(self) -> None:
        if self._fired or not self._cancel_on_kill or not self._run_json.get("job_id"):
            return
        state = await self._task_state()
        if state == KEPT_STATE:  # apache/airflow#73454: on_kill also fires when a trigger only moves
            self.log.info("the task is %s: job %s is left as it is", state, self._run_json["job_id"])
            return
        await self._cancel(f"Airflow: the task was ended by a user (now {state or 'unknown to Airflow'})")

    async def _task_state(self) -> str | None:
        task = self._run_json["task"]
        # asgiref's threads, not asyncio's: the triggerer's channel to Airflow lives in this loop and finds it through them.
        ask = sync_to_async(_compat.task_state)
        return await ask(task["dag_id"], task["run_id"], task["task_id"], task["map_index"])

    async def _cancel(self, why: str) -> None:

        desk = await asyncio.to_thread(Desk.from_json, self._desk_json)
        job_id = self._run_json["job_id"]
        await arun(desk.scheduler.cancel(job_id, why), await async_sender(desk.placement.conn_id))
        self.log.info("job %s on %s is cancelled: %s", job_id, desk.placement.cluster, why)


class Vigil:
    """A trigger's wait, step by step.

    Args:
        trigger: whose log is written.
        desk: the placement at work.
        sender: who carries the steps' requests.
    """

    def __init__(self, trigger: WorkloadTrigger, desk: Desk, sender: AsyncLocalSender) -> None:
        self._log, self._desk, self._sender = trigger.log, desk, sender
        self._said = ""

    async def keep(self, run: Run) -> tuple[Run, Action]:
        """Wait until something is to be done.

        Args:
            run: the run.

        Returns:
            The run as it is then, and what is to be done.
        """
        action: Action = Watch()
        while isinstance(action, Watch):
            if run.phase is Phase.WATCHING:
                run, action = await self._watch(run)
            else:
                await asyncio.sleep(max(0.0, run.not_before_s - time.time()))
                run, action = advance(run, Observation(time.time()), self._desk.rules)
        return run, action

    async def _watch(self, run: Run) -> tuple[Run, Action]:

        poller = self._poller()
        waiter = Waiter(reference(run), run.key.name)
        action: Action = Watch()
        notes: set[str] = set()
        soon = False
        try:
            while isinstance(action, Watch) and run.job_id:
                seen = await poller.next(waiter, soon=soon)
                notes |= seen.notes
                run, action = await self._step(run, seen, frozenset(notes))
                soon = seen.error is None and critical(seen.job, notes)
        finally:
            poller.leave(waiter)
        return run, action

    async def _step(self, run: Run, seen: Sighting, notes: frozenset[str]) -> tuple[Run, Action]:

        self._tell(run, seen)
        try:
            if seen.error is not None:
                return await arun(past_deadline(self._desk.watched(run), run, time.time()), self._sender)
            return await arun(step(self._desk.watched(run), run, seen.job, notes, time.time()), self._sender)
        except ClusterUnavailableError as error:
            self._say(f"{self._desk.placement.cluster} does not answer, waiting: {error}")
            return run, Watch()

    def _poller(self) -> Poller:

        placed = self._desk.placement
        key = PollerKey(placed.conn_id, placed.cluster, placed.work_dir, float(placed.poll_interval_s))
        return shared_poller(key, self._desk.scheduler, self._sender)

    def _tell(self, run: Run, seen: Sighting) -> None:
        cluster = self._desk.placement.cluster
        lost = f"{cluster} does not answer, waiting: {seen.error}"
        self._say(lost if seen.error is not None else self._desk.standing(run, seen.job))

    def _say(self, words: str) -> None:
        """Log what is new: a trigger that says the same every 30 s for weeks says nothing."""
        if words and words != self._said:
            self._said = words
            self._log.info("%s", words)


def encode_event(run: Run, action: Action) -> dict[str, Any]:
    """Turn a run and an action into an event's payload.

    Args:
        run: the run.
        action: what is to be done.

    Returns:
        Plain JSON.
    """
    failure = action.failure if isinstance(action, Cancel) else action
    event: dict[str, Any] = {"run": run.to_json()}
    if isinstance(failure, Fail):
        event |= {
            "action": "fail",
            "cause": failure.cause.value,
            "message": failure.message,
            "retry": failure.retry,
        }
    elif isinstance(action, Submit):
        event["action"] = "submit"
    elif isinstance(action, Succeed):
        event["action"] = "succeed"
    else:
        msg = f"{action!r} needs no worker"
        raise TypeError(msg)
    return event


def decode_event(event: Mapping[str, Any]) -> tuple[Run, str]:
    """Read an event's payload.

    Args:
        event: what :func:`encode_event` made.

    Returns:
        The run, and the action's word.
    """
    return Run.from_json(event["run"]), str(event["action"])
