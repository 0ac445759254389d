"""A run's steps as conversations: when is looked, what is asked of the cluster, and what the caller is left with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace

import pytest

from airflow_profsched.cluster.exchange import Command, Look, Reply
from airflow_profsched.cluster.exchange import run as converse
from airflow_profsched.cluster.watch import Watched, look, past_deadline, reference, step
from airflow_profsched.core.errors import ClusterUnavailableError, LostReplyError
from airflow_profsched.core.evidence import CheckpointView, Findings
from airflow_profsched.core.jobs import EndCause, JobRef, JobSnapshot, JobState, TaskKey
from airflow_profsched.core.lifecycle import Cancel, Fail, Rules, Submit, Succeed, Watch
from airflow_profsched.core.run import Phase, Run, submitting, watching

TASK = TaskKey("dag", "run", "train")
RUN = watching(submitting(Run(TASK), 1, "n", 1000.0, 10), "7")
LOOK = Look("/work", "/work/dag/attempt-1", "/work/dag/checkpoints")
NOW = 9000.0
MARKER = {
    "rank": 0, "ranks": 1, "nonce": "n", "job_id": "7", "restart": 0, "exit_code": 0, "ended_s": 8990.0, "done": True,
}  # fmt: skip


class Words:
    """A cluster that is spoken to in one-word commands: what a real one would be sent."""

    def cancel(self, job_id, why):
        yield Command(("cancel", job_id), stdin=why)

    def nudge(self, job_id):
        yield Command(("nudge", job_id))

    def hopeless(self, seen):
        return "its QoS is not valid" if seen.reason == "InvalidQOS" else ""


@dataclass
class Transport:
    """Answers a look with what lies there, and a command with success, or not at all."""

    there: Reply = field(default=Reply(0, "{}"))
    down: bool = False
    sent: list = field(default_factory=list)

    def __call__(self, request):
        self.sent.append(request)
        if isinstance(request, Look):
            return self.there
        if self.down:
            raise LostReplyError("scancel timed out")
        return Reply(0, "")


def left(*markers):
    return Reply(0, json.dumps({"markers": list(markers), "checkpoint": {"visible": True, "step": 10}}))


def take(job, *, run=RUN, notes=(), transport=None):
    transport = transport or Transport()
    watched = Watched(Words(), Rules("dgx", checkpointed=True), LOOK)
    return *converse(step(watched, run, job, notes, NOW), transport), transport.sent


def job(state, cause=None, **more):
    return JobSnapshot("7", state, cause, **more)


RUNNING = job(JobState.RUNNING)
CHEAP = replace(RUNNING, detailed=False)


@pytest.mark.parametrize(
    ("snapshot", "notes", "run", "looks"),
    [
        pytest.param(None, (), RUN, True, id="the cluster does not know it"),
        pytest.param(job(JobState.FAILED, EndCause.PREEMPTED), (), RUN, True, id="it has ended"),
        pytest.param(RUNNING, (), RUN, True, id="it runs, with details: now and then"),
        pytest.param(job(JobState.UNDETERMINED), (), RUN, True, id="an unknown word: only evidence can decide"),
        pytest.param(CHEAP, (), RUN, False, id="it plainly runs"),
        pytest.param(CHEAP, ("start", "notice"), RUN, False, id="it has got its notice"),
        pytest.param(CHEAP, ("end",), RUN, True, id="its node says that it has ended"),
        pytest.param(CHEAP, (), replace(RUN, marked_since_s=1.0), True, id="all its ranks had ended"),
        pytest.param(job(JobState.QUEUED), ("end",), RUN, False, id="it waits"),
    ],
)
def test_the_directories_are_looked_at_where_that_may_decide_something(snapshot, notes, run, looks):
    _, _, sent = take(snapshot, run=run, notes=notes)
    assert sent == ([LOOK] if looks else [])


def test_an_end_with_evidence_is_the_callers_to_act_upon():
    run, action, sent = take(job(JobState.DONE, EndCause.COMPLETED), transport=Transport(left(MARKER)))
    assert (action, run.phase, sent) == (Succeed(), Phase.DONE, [LOOK])


def test_a_preempted_job_is_the_callers_to_submit_again():
    ended = job(JobState.FAILED, EndCause.PREEMPTED)
    assert take(ended, transport=Transport(left(MARKER | {"done": False, "step": 20})))[1] == Submit()


def test_directories_that_cannot_be_read_are_no_evidence_and_no_error():
    run, action, _ = take(
        job(JobState.DONE, EndCause.COMPLETED), transport=Transport(Reply(13, "", "permission denied"))
    )
    assert (action, run.ended_since_s) == (Watch(), NOW)


def test_a_look_that_is_refused_says_why():
    found = converse(look(LOOK), Transport(Reply(13, "", "permission denied")))
    assert found == Findings(strange=("permission denied",))
    assert found.checkpoint == CheckpointView(visible=False, error="not looked")


@pytest.mark.parametrize("state", [JobState.QUEUED, JobState.REQUEUED])
def test_a_waiting_job_that_can_never_start_is_cancelled_and_fails(state):
    _, action, sent = take(job(state, reason="InvalidQOS"))
    assert isinstance(action, Cancel)
    assert "its QoS is not valid" in action.failure.message
    assert sent == [Command(("cancel", "7"), stdin=action.failure.message)]


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.QUEUED_HELD, JobState.SUSPENDED])
def test_a_reason_says_nothing_of_a_job_that_does_not_wait_for_room(state):
    assert take(job(state, reason="InvalidQOS"))[1] == Watch()


def test_a_nudge_is_given_here_and_watching_goes_on():
    _, action, sent = take(job(JobState.REQUEUED, reason="BeginTime", restarts=1))
    assert (action, sent) == (Watch(), [Command(("nudge", "7"))])


def test_a_held_job_is_cancelled_here_and_watching_goes_on():
    run, action, sent = take(job(JobState.REQUEUED_HELD, reason="JobHoldMaxRequeue"))
    assert (action, run.stopping) == (Watch(), "disrupted")
    assert sent[0].argv == ("cancel", "7")


def test_a_stop_that_got_no_answer_is_not_noted_so_that_it_is_tried_again():
    with pytest.raises(ClusterUnavailableError):
        take(job(JobState.REQUEUED_HELD), transport=Transport(down=True))


def test_the_reference_tells_the_job_from_another_of_the_same_id():
    assert reference(RUN) == JobRef("7", TASK.name, 1000.0)


# ------------------------------------------------------------------------------------ the deadline


def pass_deadline(run, deadline_s, *, down=False):
    transport = Transport(down=down)
    watched = Watched(Words(), Rules("dgx", checkpointed=True, deadline_s=deadline_s), LOOK)
    return *converse(past_deadline(watched, run, NOW), transport), transport.sent


@pytest.mark.parametrize("deadline_s", [None, NOW + 1])
def test_a_cluster_that_does_not_answer_is_waited_for_until_the_deadline(deadline_s):
    assert pass_deadline(RUN, deadline_s) == (RUN, Watch(), [])


def test_past_the_deadline_the_job_is_cancelled():
    run, action, sent = pass_deadline(RUN, NOW)
    assert (run.outcome, action.failure.cause) == ("deadline", EndCause.DEADLINE)
    assert sent == [Command(("cancel", "7"), stdin=action.failure.message)]


def test_past_the_deadline_a_job_that_cannot_be_cancelled_is_left_and_the_task_fails_all_the_same():
    run, action, _ = pass_deadline(RUN, NOW, down=True)
    assert isinstance(action, Fail)
    assert run.phase is Phase.DONE
    assert "scancel timed out" in action.message
    assert "profsched orphans" in action.message


def test_past_the_deadline_there_may_be_no_job_to_cancel():
    _, action, sent = pass_deadline(Run(TASK), NOW)
    assert isinstance(action, Fail)
    assert sent == []
