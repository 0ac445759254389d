"""What people see of a run: the task's log, its record, its result, and the message of a failure."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from airflow_profsched.cluster.exchange import ReadFile, Reply
from airflow_profsched.core.jobs import JobKey

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import Context

    from airflow_profsched.cluster.transports import LocalSender
    from airflow_profsched.core.jobs import JobSnapshot
    from airflow_profsched.core.run import Attempt, Run
    from airflow_profsched.hooks.desk import Desk

log = logging.getLogger(__name__)

LAST_LINES = 20
"""How many of the log's last lines an error's message holds."""

RESULT_BYTES = 1 << 20
"""The largest result that becomes an XCom."""


class Reporter:
    """Tells people what became of a run.

    Args:
        desk: the placement at work.
        sender: who reads the files.
        context: the task's context.
        log_bytes: how much of the end of an attempt's log is shown.
    """

    def __init__(self, desk: Desk, sender: LocalSender, context: Context, log_bytes: int) -> None:
        self._desk, self._sender, self._context, self._log_bytes = desk, sender, context, log_bytes
        self._said = ""

    def say(self, words: str) -> None:
        """Log something that is new.

        Args:
            words: what; the empty text and a repetition say nothing.
        """
        if words and words != self._said:
            self._said = words
            log.info("%s", words)

    def submitted(self, run: Run) -> None:
        """Say what was submitted.

        Args:
            run: the run, watching its job.
        """
        placed = self._desk.placement
        place = ", ".join(
            f"{name} {value}" for name, value in (("QoS", placed.qos), ("partition", placed.partition)) if value
        )
        start = "from the beginning" if run.start_step is None else f"from the checkpoint of step {run.start_step}"
        self.say(
            f"submitted job {run.job_id} to {placed.cluster} ({place or 'its defaults'}): "
            f"attempt {run.attempt} of {run.task.name}, {start}"
        )
        self._count("submitted")
        if run.history:
            self._count("resumed")

    def seen(self, run: Run, job: JobSnapshot | None) -> None:
        """Say how a job stands, when that has changed.

        Args:
            run: the run.
            job: what the cluster said; None where it does not know the job.
        """
        self.say(self._desk.standing(run, job))

    def ended(self, run: Run) -> None:
        """Show the log of the attempt that has just ended, under a heading.

        Args:
            run: the run.
        """
        if not run.history:
            return
        last = run.history[-1]
        self._count(last.cause)
        log.info("%s", _heading(last))
        reply = self._log(run, last, self._log_bytes)
        if reply.code:
            log.info("its log cannot be shown: %s", reply.err)
        for line in reply.out.splitlines():
            log.info("%s", line)
        log.info("========== end of the log of attempt %d ==========", last.attempt)
        self._as_asked(run)

    def _as_asked(self, run: Run) -> None:
        """Say what the cluster gave instead of what was asked for: a site's submit plugin may rewrite a submission."""
        asked, given = self._desk.placement, run.granted
        for what, wanted, got in (("QoS", asked.qos, given.qos), ("partition", asked.partition, given.partition)):
            if wanted and got and wanted != got:
                log.warning("asked for %s %s, but the cluster gave %s", what, wanted, got)

    def _log(self, run: Run, attempt: Attempt, max_bytes: int) -> Reply:
        return self._sender(self._desk.log_tail(JobKey(run.task, attempt.attempt), max_bytes))

    def _count(self, event: str) -> None:
        from airflow.providers.common.compat.sdk import Stats  # noqa: PLC0415 - set up in running tasks only

        placed = self._desk.placement
        Stats.incr(f"profsched.{event}", tags={"cluster": placed.cluster, "profile": placed.profile})

    def record(self, run: Run) -> dict[str, Any]:
        """Return the task's record, for the XCom `profsched`.

        Args:
            run: the run.

        Returns:
            Job id, cluster, profile, attempts with their causes, times in seconds and checkpoint steps.
        """
        rows = [_row(attempt) for attempt in run.history]
        last = run.history[-1] if run.history else None
        return {
            "key": run.task.name,
            "cluster": self._desk.placement.cluster,
            "profile": self._desk.placement.profile,
            "job_id": run.job_id or (last.job_id if last else ""),
            "attempt": run.attempt,
            "preemptions": run.preemptions,
            "waited_s": sum(row["waited_s"] or 0 for row in rows),
            "ran_s": sum(row["ran_s"] or 0 for row in rows),
            "step": last.step if last else run.start_step,
            "checkpoint_dir": self._desk.checkpoint_dir(run.task),
            "outcome": run.outcome,
            "attempts": rows,
        }

    def result(self, run: Run) -> Any:
        """Return what the program wrote into `PROFSCHED_RESULT`.

        Args:
            run: the run, succeeded.

        Returns:
            Its JSON; None where there is no file. What is no JSON, or too large, is said in the log.
        """
        key = run.key if not run.history else JobKey(run.task, run.history[-1].attempt)
        request = self._desk.result(key, RESULT_BYTES + 1)
        reply = self._sender(request)
        if reply.code or not reply.out.strip():
            return self._no_result(reply, request)
        if len(reply.out.encode("utf-8", "surrogateescape")) > RESULT_BYTES:
            log.warning("the result is larger than %d bytes and is left in %s", RESULT_BYTES, request.path)
            return None
        try:
            return json.loads(reply.out)
        except (ValueError, RecursionError) as error:
            log.warning("the result in %s is no JSON (%s) and is left there", request.path, error)
            return None

    def _no_result(self, reply: Reply, request: ReadFile) -> None:
        if reply.code not in (0, _ENOENT):
            log.warning("the result in %s cannot be read: %s", request.path, reply.err)

    def failure_words(self, run: Run, message: str, look_further: str) -> str:
        """Complete an error's message.

        Args:
            run: the run.
            message: what happened.
            look_further: the command with which a person looks further.

        Returns:
            The message, the log's last lines, and that command.
        """
        words = [message]
        if run.history:
            lines = self._log(run, run.history[-1], 16384).out.splitlines()[-LAST_LINES:]
            words += ["", "The last lines of its log:", *(f"    {line}" for line in lines)] if lines else []
        if look_further:
            words += ["", f"To look further: {look_further}"]
        return "\n".join(words)


_ENOENT = 2


def _heading(ended: Attempt) -> str:
    words = [f"========== log of attempt {ended.attempt}: job {ended.job_id}"]
    words += [f"on {ended.nodes}"] if ended.nodes else []
    words += [f"ended: {ended.cause.replace('_', ' ')}"]
    words += [f"checkpoint step {ended.step}"] if ended.step is not None else []
    return ", ".join(words) + " =========="


def _row(attempt: Attempt) -> dict[str, Any]:
    waited = ran = None
    if attempt.start_s is not None and attempt.submitted_s is not None:
        waited = max(0.0, round(attempt.start_s - attempt.submitted_s, 1))
    if attempt.start_s is not None and attempt.end_s is not None:
        ran = max(0.0, round(attempt.end_s - attempt.start_s, 1))
    return {
        "attempt": attempt.attempt,
        "job_id": attempt.job_id,
        "ended_by": attempt.cause,
        "exit_code": attempt.exit_code,
        "waited_s": waited,
        "ran_s": ran,
        "start_step": attempt.start_step,
        "step": attempt.step,
        "qos": attempt.qos,
        "partition": attempt.partition,
        "nodes": attempt.nodes,
    }
