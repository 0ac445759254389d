"""What the machine does while a job lives: restarts in place, held and hopeless jobs, jobs that outlive their ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest

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

TASK = TaskKey("dag", "run", "train")
RULES = Rules("dgx", checkpointed=True)
RUN = watching(submitting(Run(TASK), 1, "n", 1000.0, 10), "7")
NOW = 9000.0


def left(*markers, step=10):
    return Findings(markers, checkpoint=CheckpointView(visible=True, step=step))


def marker(*, exit_code=0, notice_s=None, restart=0, **more):
    return EndMarker(0, 1, "n", "7", restart, exit_code, 8990.0, notice_s, **more)


DONE = marker(done=True)


def job(state, cause=None, **more):
    return JobSnapshot("7", state, cause, **({"start_s": 2000.0} | more))


RUNNING = job(JobState.RUNNING, raw="RUNNING")
CANCELLED = job(JobState.FAILED, EndCause.CANCELLED, exit_code=0, end_s=NOW)


def see(run, snapshot, found=None, now_s=NOW, **more):
    return advance(run, Observation(now_s, snapshot, found, **more), RULES)


@pytest.mark.parametrize(
    "state", [state for state in JobState if not state.ended and state is not JobState.REQUEUED_HELD]
)
def test_a_job_that_lives_is_watched_whatever_its_state(state):
    run, action = see(RUN, job(state), left())
    assert action == Watch()
    assert run.phase is Phase.WATCHING


def test_what_the_cluster_really_gave_is_read_back():
    granted = Granted("rewritten", "other", 3600, "n1")
    run, _ = see(RUN, replace(RUNNING, granted=granted, restarts=2))
    assert (run.granted, run.restarts, run.started_s) == (granted, 2, 2000.0)


def test_what_was_not_asked_is_not_taken_for_an_answer():
    run, _ = see(RUN, replace(RUNNING, granted=Granted("q"), restarts=2))
    assert see(run, JobSnapshot("7", JobState.RUNNING, detailed=False))[0] == run


def test_the_nodes_of_an_ended_job_are_remembered_where_the_cluster_names_none_any_more():
    run, _ = see(RUN, replace(RUNNING, granted=Granted("q", nodes="n1")))
    run, _ = see(run, job(JobState.FAILED, EndCause.PREEMPTED, granted=Granted("q")), left(step=20))
    assert (run.history[-1].nodes, run.history[-1].qos) == ("n1", "q")


# ------------------------------------------------------------------------------------ restarted in place


def test_a_job_that_the_cluster_put_off_after_a_restart_is_nudged_each_time_it_is_seen_so():
    put_off = job(JobState.REQUEUED, restarts=1, reason="BeginTime")
    run, action = see(RUN, put_off)
    assert action == Nudge()  # given while COMPLETING it is lost: hence again
    assert see(run, put_off)[1] == Nudge()


@pytest.mark.parametrize(
    "snapshot", [job(JobState.QUEUED, reason="BeginTime"), job(JobState.REQUEUED, restarts=1, reason="Resources")]
)
def test_nobody_is_nudged_whom_no_restart_has_put_off(snapshot):
    assert see(RUN, snapshot)[1] == Watch()


def test_a_restarted_job_is_watched_on_and_the_markers_of_its_start_before_tell_nothing():
    old = left(DONE)
    run, _ = see(RUN, RUNNING, old)
    for later in (0, 100, 1000):
        run, action = see(run, replace(RUNNING, restarts=1, start_s=8000.0), old, NOW + later)
        assert action == Watch()
        assert run.marked_since_s is None
    assert run.started_s == 8000.0
    assert see(run, job(JobState.FAILED, EndCause.CANCELLED, restarts=1), old)[1].cause is EndCause.CANCELLED
    assert (
        see(run, job(JobState.DONE, EndCause.COMPLETED, restarts=1), left(marker(restart=1, done=True)))[1] == Succeed()
    )


def test_a_restart_that_only_the_state_shows_starts_the_minute_anew():
    run, _ = see(RUN, RUNNING, left(DONE))
    run, _ = see(run, JobSnapshot("7", JobState.QUEUED, detailed=False), None, NOW + 30)
    assert run.marked_since_s is None
    run, action = see(run, JobSnapshot("7", JobState.RUNNING, detailed=False), left(DONE), NOW + 90)
    run, action = see(run, JobSnapshot("7", JobState.RUNNING, detailed=False), left(DONE), NOW + 900)
    assert action == Watch()  # only details tell whether the markers are of this start


def test_a_job_that_the_cluster_restarted_and_held_is_stopped_once_and_replaced():
    held = job(JobState.REQUEUED_HELD, reason="JobHoldMaxRequeue", restarts=5)
    run, action = see(RUN, held)
    assert isinstance(action, StopAttempt)
    assert "JobHoldMaxRequeue" in action.why
    run, action = see(run, held)
    assert action == Watch()
    run, action = see(run, CANCELLED, left(step=20))
    assert (action, run.history[-1].cause) == (Submit(), "disrupted")


def test_a_held_job_without_a_reason_is_named_by_its_raw_state():
    assert "REQUEUE_HOLD" in see(RUN, job(JobState.REQUEUED_HELD, raw="REQUEUE_HOLD"))[1].why


# ------------------------------------------------------------------------------------ hopeless


def test_a_job_that_can_never_start_fails_at_once_in_words():
    run, action = see(RUN, job(JobState.QUEUED), hopeless="Slurm says InvalidQOS: its QoS is not valid")
    assert isinstance(action, Cancel)
    assert (action.failure.cause, action.failure.retry) == (EndCause.CONFIG, False)
    assert "can never start: Slurm says InvalidQOS" in action.failure.message
    assert (run.phase, run.outcome) == (Phase.DONE, "config")


def test_a_job_that_can_never_start_without_the_nodes_we_keep_it_away_from_gets_them_back():
    run, action = see(replace(RUN, excluded=("n1", "n2")), job(JobState.QUEUED), hopeless="BadConstraints")
    assert isinstance(action, StopAttempt)
    assert "without n1, n2" in action.why
    assert see(run, job(JobState.QUEUED), hopeless="BadConstraints")[1] == Watch()
    run, action = see(run, CANCELLED, left(step=20))
    assert (action, run.excluded) == (Submit(), ())


# ------------------------------------------------------------------------------------ outliving its ranks


@pytest.mark.parametrize("state", [JobState.RUNNING, JobState.UNDETERMINED])
@pytest.mark.parametrize(
    ("noted", "cause"),
    [
        (DONE, "completed"),
        (marker(exit_code=3), "nonzero_exit"),
        (marker(exit_code=85, notice_s=5.0), "preempted"),
        (marker(), "lost"),
    ],
)
def test_a_job_that_goes_on_a_minute_after_all_its_ranks_have_ended_is_stopped_and_the_markers_decide(
    state, noted, cause
):
    run, action = see(RUN, job(state, raw="RUNNING"), left(noted))
    assert action == Watch()
    run, action = see(run, job(state, raw="RUNNING"), left(noted), NOW + 59)
    assert action == Watch()
    run, action = see(run, job(state, raw="RUNNING"), left(noted), NOW + 60)
    assert isinstance(action, StopAttempt)
    assert "the cluster says RUNNING" in action.why
    assert run.stopping == cause
    assert see(run, job(state, raw="RUNNING"), left(noted), NOW + 61)[1] == Watch()


def stopped(noted):
    run, _ = see(RUN, RUNNING, left(noted))
    run, action = see(run, RUNNING, left(noted), NOW + 60)
    assert isinstance(action, StopAttempt)
    return run


def test_cancelled_after_we_stopped_it_ends_by_what_we_stopped_it_for():
    assert see(stopped(DONE), CANCELLED, left(DONE))[1] == Succeed()
    _, action = see(stopped(marker(exit_code=3)), CANCELLED, left(marker(exit_code=3)))
    assert (action.cause, action.retry) == (EndCause.NONZERO_EXIT, True)
    assert "failed with exit code 3" in action.message
    assert see(stopped(marker(exit_code=85, notice_s=5.0)), CANCELLED, left(step=20))[1] == Submit()


def test_a_marker_that_is_gone_after_we_stopped_it_leaves_its_cause_without_a_code():
    _, action = see(stopped(marker(exit_code=3)), CANCELLED, left())
    assert (action.cause, "exit code" in action.message) == (EndCause.NONZERO_EXIT, False)


def test_another_end_than_the_one_we_asked_for_says_itself_what_it_was():
    run, _ = see(stopped(marker()), job(JobState.FAILED, EndCause.NODE_FAIL), left(marker(), step=20))
    assert run.history[-1].cause == "node_fail"


@pytest.mark.parametrize(("noted", "outcome"), [(DONE, Succeed), (marker(exit_code=3), Fail)])
def test_a_job_that_does_not_even_go_when_stopped_does_not_keep_the_task_from_ending(noted, outcome):
    stuck = job(JobState.RUNNING, raw="COMPLETING")
    run = stopped(noted)
    assert see(run, stuck, left(noted), NOW + 359)[1] == Watch()
    assert isinstance(see(run, stuck, left(noted), NOW + 360)[1], outcome)


def test_another_attempt_waits_until_the_job_is_gone():
    noted = marker(exit_code=85, notice_s=5.0, step=20)
    assert see(stopped(noted), RUNNING, left(noted), NOW + 1e6)[1] == Watch()


def test_ranks_that_have_not_all_ended_are_waited_for():
    run, _ = see(RUN, RUNNING, left(DONE))
    run, _ = see(run, RUNNING, left(), NOW + 30)
    assert run.marked_since_s is None


def test_without_a_look_nothing_is_concluded_from_the_look_before():
    run, _ = see(RUN, RUNNING, left(DONE))
    assert see(run, RUNNING, None, NOW + 100) == (replace(run, started_s=2000.0), Watch())


# ------------------------------------------------------------------------------------ adopted


def test_an_adopted_job_that_was_cancelled_is_followed_by_a_fresh_attempt_once():
    run = watching(submitting(Run(TASK), 1, "n", 1000.0, 10), "7", adopted=True)
    marked = replace(CANCELLED, cancel_marked=True)
    run, action = see(run, marked, left())
    assert (action, run.adopted, run.without_progress) == (Submit(), False, 0)
    run = watching(submitting(run, 2, "n", NOW, 10), "7")
    assert see(run, marked, left())[1].cause is EndCause.CANCELLED


def test_an_adopted_job_that_somebody_cancelled_on_the_cluster_stays_cancelled():
    run = watching(submitting(Run(TASK), 1, "n", 1000.0, 10), "7", adopted=True)
    assert see(run, CANCELLED, left())[1].cause is EndCause.CANCELLED


def test_who_cancelled_a_job_is_waited_for_but_not_for_ever():
    asked = replace(CANCELLED, complete=False)
    run, action = see(RUN, asked, left())
    assert action == Watch()
    assert see(run, asked, left(), NOW + 61)[1].cause is EndCause.CANCELLED


def test_an_adopted_job_that_failed_by_itself_fails_the_task():
    run = replace(RUN, adopted=True)
    _, action = see(run, job(JobState.FAILED, EndCause.NONZERO_EXIT), left(marker(exit_code=3)))
    assert action.cause is EndCause.NONZERO_EXIT
