"""What a worker does for a run: begin or adopt, submit, wait where nobody else waits, report."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow.providers.common.compat.sdk import conf

from airflow_profsched import _compat
from airflow_profsched.cluster import mailbox, workdir
from airflow_profsched.cluster.exchange import Look
from airflow_profsched.cluster.exchange import run as converse
from airflow_profsched.cluster.poller import TICK_S, Agenda, Waiter, critical
from airflow_profsched.cluster.scheduler import Order
from airflow_profsched.cluster.watch import look, past_deadline, reference, step
from airflow_profsched.core.errors import ClusterUnavailableError, LostReplyError, SubmitError, SubmitLimitError
from airflow_profsched.core.jobs import FoundJob, JobKey, TaskKey
from airflow_profsched.core.lifecycle import Action, Observation, Watch, advance
from airflow_profsched.core.run import Phase, Run, submitting, waiting, watching
from airflow_profsched.hooks.desk import Desk, read_site
from airflow_profsched.hooks.slurm import SlurmHook
from airflow_profsched.links import RECORD_KEY
from airflow_profsched.operators import plan as planning
from airflow_profsched.operators.report import Reporter

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from airflow_profsched.cluster.transports import LocalSender
    from airflow_profsched.operators.workload import WorkloadOperator

RUN_KEY = "profsched_run"
"""Key of the run in the task's state store."""

ASK_AGAIN_S = 30.0
"""How long to wait before a submission that was refused for now, or got no answer, is tried again."""

DYING_S = 5.0
"""How long to wait before looking again whether a job that was cancelled has gone."""


@dataclass
class Conductor:
    """A worker's hands on one run.

    Args:
        plan: what is to be run.
        desk: the placement at work.
        task: whose run it is.
        context: the task's context.
        durable: whether a living job of an earlier try is adopted.
    """

    plan: planning.Plan
    desk: Desk
    task: TaskKey
    context: Context
    durable: bool = True
    drained: bool = False
    _job_id: str = ""

    @classmethod
    def of(cls, operator: WorkloadOperator, context: Context, desk: Mapping[str, Any] | None = None) -> Conductor:
        """Make the conductor of an operator.

        Args:
            operator: the operator, rendered.
            context: the task's context.
            desk: the desk that the trigger carried; None: the policy is asked.

        Returns:
            The conductor.

        Raises:
            PolicyError: the policy does not offer what the operator asks for.
        """
        placed = planning.placement(operator, context) if desk is None else None
        made = (
            Desk(placed, None, planning.deadline(operator, context, placed)) if placed else Desk.from_json(desk or {})
        )
        return cls(planning.plan(operator, context), made, planning.task_key(context), context, operator.durable)

    @cached_property
    def hook(self) -> SlurmHook:
        """The connection."""
        return SlurmHook(self.desk.placement.conn_id)

    @cached_property
    def sender(self) -> LocalSender:
        """Who carries the requests."""
        return self.hook.get_conn()

    @cached_property
    def reporter(self) -> Reporter:
        """Who tells people."""
        return Reporter(self.desk, self.sender, self.context, conf.getint("profsched", "log_bytes", fallback=262144))

    # ------------------------------------------------------------------------------------------------ begin

    def begin(self) -> Run:
        """Start a run: go on with a living job of an earlier try, or submit the first attempt.

        Returns:
            The run, watching a job or waiting for its turn.
        """
        for reason in self.desk.placement.reasons:
            self.reporter.say(reason)
        workdir.check_work_dir(self.desk.placement.work_dir, self.desk.placement.cluster)
        self.desk = replace(self.desk, site=read_site(self.desk.placement, self.sender))
        kept = _compat.state_store(self.context).get(RUN_KEY)
        before = Run.from_json(kept) if isinstance(kept, dict) else None
        if before is None and self.plan.try_number == 1:
            return self.submit(Run(self.task))
        return self._go_on_after(before or Run(self.task))

    def _go_on_after(self, before: Run) -> Run:
        """Another try, or a clear: what came before decides where this one starts."""
        if before.phase is Phase.DONE:
            if before.outcome == "succeeded" or self.plan.fresh_on_retry:
                moved = workdir.set_checkpoints_aside(self.desk.placement.work_dir, self.task)
                self.reporter.say(f"starting afresh: the old checkpoints were moved to {moved}" if moved else "")
            before = Run(self.task, attempt=before.attempt)
        elif self.plan.cleared:  # whatever lives was wanted before the clear: it goes, and a fresh job takes its place
            before = Run(self.task, attempt=before.attempt)
        return self.submit(replace(before, phase=Phase.SUBMITTING if before.phase is Phase.NEW else before.phase))

    def keep(self, run: Run) -> None:
        """Keep the run where the next try finds it.

        Args:
            run: the run.
        """
        self._job_id = run.job_id
        _compat.state_store(self.context).set(RUN_KEY, run.to_json())

    # ------------------------------------------------------------------------------------------------ submit

    def submit(self, run: Run) -> Run:
        """Submit the next attempt; first look for a job where an earlier submission is possible.

        Args:
            run: the run, without a job.

        Returns:
            The run: watching its job, or waiting because the cluster cannot take it now.
        """
        try:
            if self._submitted_before(run):
                found = self._find_living(run)
                if found is not None:
                    return found
            return self._submit_new(run)
        except workdir.AttemptExistsError:
            return self.submit(replace(run, phase=Phase.SUBMITTING))
        except ClusterUnavailableError as error:
            self.reporter.say(
                f"{self.desk.placement.cluster} does not answer, trying again in {ASK_AGAIN_S:.0f} s: {error}"
            )
            return self._kept(replace(run, not_before_s=time.time() + ASK_AGAIN_S))

    def _submitted_before(self, run: Run) -> bool:
        """Whether a job may live already; a first submission costs no question."""
        if run.phase is not Phase.NEW:
            return run.phase in (Phase.SUBMITTING, Phase.WATCHING)
        # A DAG run that was deleted and made again, or a store that was lost, leaves directories of attempts behind.
        return workdir.highest_attempt(self.desk.placement.work_dir, self.task) > 0

    def _kept(self, run: Run) -> Run:
        self.keep(run)
        return run

    def _find_living(self, run: Run) -> Run | None:
        """The living job of an earlier submission; None where there is none, and a new one may be submitted."""
        jobs = converse(self.desk.scheduler.find(self.task), self.sender)
        living = [job for job in jobs if not job.cancelled]
        anew = not self.durable or (self.plan.cleared and not any(job.nonce == run.nonce for job in living))
        if jobs and (not living or anew):
            for job in living:
                converse(self.desk.scheduler.cancel(job.job_id, "Airflow: a later try starts anew"), self.sender)
            self.reporter.say(f"waiting until job {jobs[0].job_id} of an earlier try has gone")
            return self._kept(replace(run, phase=Phase.SUBMITTING, not_before_s=time.time() + DYING_S))
        if living:
            return self._adopt(run, living[0])
        if run.phase is Phase.WATCHING and not anew:
            return self._kept(replace(run, adopted=True))  # it has ended meanwhile; how, the next step will see
        return None

    def _adopt(self, run: Run, job: FoundJob) -> Run:
        attempt = job.attempt or max(run.attempt, workdir.highest_attempt(self.desk.placement.work_dir, self.task), 1)
        spec = workdir.read_spec(self.desk.placement.work_dir, JobKey(self.task, attempt))
        nonce = job.nonce or str(spec.get("nonce", ""))
        own = run.attempt == attempt and run.nonce == nonce
        self.reporter.say(f"adopting job {job.job_id} of an earlier try (attempt {attempt})")
        begun = run if own else submitting(run, attempt, nonce, job.submit_s or time.time(), None)
        return self._kept(watching(begun, job.job_id, adopted=True))

    def _submit_new(self, run: Run) -> Run:
        placed, before = self.desk.placement, run
        highest = workdir.highest_attempt(placed.work_dir, self.task)
        paths = self.desk.paths(JobKey(self.task, max(run.attempt, highest) + 1))
        run = submitting(run, paths.key.attempt, uuid.uuid4().hex, time.time(), self._newest_step(paths))
        order = Order(run.key, run.nonce, paths.attempt_dir, self.plan.try_number, run.excluded)
        self.keep(run)
        planning.lay_out(self.plan, self.desk, run, self.desk.scheduler.render(order))
        try:
            job_id = converse(self.desk.scheduler.submit(order), self.sender)
        except LostReplyError as error:
            self.reporter.say(f"no answer to the submission, and the job cannot be looked up yet: {error}")
            return self._kept(replace(run, not_before_s=time.time() + ASK_AGAIN_S))
        except (ClusterUnavailableError, SubmitLimitError) as error:
            workdir.remove_attempt(paths)
            self.reporter.say(f"not submitted, trying again in {ASK_AGAIN_S:.0f} s: {error}")
            return self._kept(waiting(replace(before, fence=run.fence), time.time() + ASK_AGAIN_S))
        except SubmitError as error:
            if not run.excluded:
                raise
            workdir.remove_attempt(paths)  # perhaps refused only because of the nodes that we keep it away from
            self.reporter.say(f"refused without {', '.join(run.excluded)}, trying with them: {error}")
            return self._submit_new(replace(before, excluded=()))
        run = self._kept(watching(run, job_id))
        self.reporter.submitted(run)
        self.record(run)
        return run

    def _newest_step(self, paths: workdir.AttemptPaths) -> int | None:
        directory = self.desk.checkpoint_dir(self.task)
        if not directory:
            return None
        placed = self.desk.placement
        request = Look(placed.work_dir, paths.attempt_dir, directory, placed.layout)
        return converse(look(request), self.sender).checkpoint.step

    # ------------------------------------------------------------------------------------------------ wait

    def wait(self, run: Run) -> tuple[Run, Action | None]:
        """Wait in the worker until something is to be done.

        Args:
            run: the run.

        Returns:
            The run, and what is to be done; None where the worker has to go and the triggerer takes over.
        """
        agenda, seen = Agenda(float(self.desk.placement.poll_interval_s)), _Seen(set())
        action: Action = Watch()
        while isinstance(action, Watch):
            if self.drained:
                return run, None
            if run.phase is Phase.WATCHING:
                run, action = self._tick(run, agenda, seen)
                pause_s = TICK_S
            else:
                run, action = advance(run, Observation(time.time()), self.desk.rules)
                pause_s = min(TICK_S, max(0.0, run.not_before_s - time.time()))
            if isinstance(action, Watch):
                time.sleep(pause_s)
        return run, action

    def _tick(self, run: Run, agenda: Agenda, seen: _Seen) -> tuple[Run, Action]:
        work_dir = self.desk.placement.work_dir
        listed = {note: events for note, events in mailbox.list_mailbox(work_dir).items() if note == run.key.name}
        seen.notes.update(*listed.values())
        soon = {run.job_id} if seen.soon else set()
        refs, details = agenda.due(time.monotonic(), [Waiter(reference(run), run.key.name)], soon, listed)
        if not refs:
            return run, Watch()
        watched = self.desk.watched(run)
        try:
            job = converse(self.desk.scheduler.query(refs, details), self.sender).get(run.job_id)
            mailbox.clear_notes(work_dir, listed)
            self.reporter.seen(run, job)
            seen.soon = critical(job, seen.notes)
            return converse(step(watched, run, job, frozenset(seen.notes), time.time()), self.sender)
        except ClusterUnavailableError as error:
            agenda.unanswered()
            self.reporter.say(f"{self.desk.placement.cluster} does not answer, waiting: {error}")
            return converse(past_deadline(watched, run, time.time()), self.sender)

    def step_once(self, run: Run) -> tuple[Run, Mapping[str, Any] | None]:
        """Take one step without waiting, after a trigger met an error of its own.

        Args:
            run: the run.

        Returns:
            The run, and an event where something is to be done.
        """
        from airflow_profsched.triggers.workload import encode_event  # noqa: PLC0415 - it imports what this module does

        if run.phase is Phase.WATCHING:
            run, action = self._tick(run, Agenda(float(self.desk.placement.poll_interval_s)), _Seen(set()))
        else:
            run, action = advance(run, Observation(time.time()), self.desk.rules)
        return run, None if isinstance(action, Watch) else encode_event(run, action)

    def killed(self, cancel: bool) -> None:  # noqa: FBT001 - a thread's argument
        """Airflow's on_kill: cancel if the user meant it, hand over to the triggerer if the worker has to go.

        Args:
            cancel: the operator's `cancel_on_kill`.
        """
        key = self.task
        state = _compat.task_state(key.dag_id, key.run_id, key.task_id, key.map_index)
        if state == "running":
            self.drained = True
            self.reporter.say(f"this worker has to go: job {self._job_id or '(none)'} is left to the triggerer")
        elif cancel and self._job_id:
            why = f"Airflow: the task was ended by a user (now {state or 'unknown to Airflow'})"
            converse(self.desk.scheduler.cancel(self._job_id, why), self.sender)

    # ------------------------------------------------------------------------------------------------ report

    def was_preempted(self, run: Run) -> bool:
        """Whether the attempt that ended last was preempted."""
        return bool(run.history) and run.history[-1].cause == "preempted"

    def report(self, run: Run, action: str) -> None:
        """Show the log of the attempt that has ended, and keep the record.

        Args:
            run: the run.
            action: the word of what is to be done.
        """
        if action != "broken":
            self.reporter.ended(run)
        self.record(run)

    def record(self, run: Run) -> None:
        """Push the task's record.

        Args:
            run: the run.
        """
        url = str(self.hook.extra.get("job_url", "")).replace("{job_id}", _last_job(run))
        self.context["ti"].xcom_push(key=RECORD_KEY, value=self.reporter.record(run) | ({"url": url} if url else {}))

    def result(self, run: Run) -> Any:
        """Return the program's result.

        Args:
            run: the run, succeeded.

        Returns:
            What the program wrote into `PROFSCHED_RESULT`, as JSON; None where it wrote nothing.
        """
        return self.reporter.result(run)

    def failure_words(self, run: Run, message: str) -> str:
        """Complete an error's message: the log's last lines, and the command to look further.

        Args:
            run: the run.
            message: what happened.

        Returns:
            The message.
        """
        return self.reporter.failure_words(run, message, self.desk.scheduler.look_further(_last_job(run)))


@dataclass
class _Seen:
    notes: set[str]
    soon: bool = False


def _last_job(run: Run) -> str:
    return run.job_id or (run.history[-1].job_id if run.history else "")
