"""The machine of preemption and resume, decision by decision (design §3, §4; regressions.md)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from airflow_profsched.core.evidence import CheckpointView, EndMarker, Findings
from airflow_profsched.core.jobs import EndCause, Granted, JobSnapshot, JobState, TaskKey
from airflow_profsched.core.lifecycle import (
    RECOVERY,
    Cancel,
    Fail,
    Observation,
    Recovery,
    Rules,
    Submit,
    Succeed,
    Watch,
    advance,
)
from airflow_profsched.core.run import Attempt, Phase, Run, submitting, waiting, watching

TASK = TaskKey("dag", "run", "train")
RULES = Rules("dgx", checkpointed=True)
GANG = replace(RULES, ranks=2)
RUN = watching(submitting(Run(TASK), 1, "n", 1000.0, 10), "7")  # submitted at the checkpoint of step 10
NOW = 9000.0
NOWHERE = Findings(checkpoint=CheckpointView(visible=False, error="no such directory"))


def at_step(step, *markers, plain=False):
    return Findings(markers, plain, CheckpointView(visible=True, step=step))


def marker(rank=0, *, exit_code=0, notice_s=None, **more):
    return EndMarker(rank, 1, more.pop("nonce", "n"), "7", more.pop("restart", 0), exit_code, 8990.0, notice_s, **more)


def done(rank=0, **more):
    return marker(rank, done=True, **more)


def job(state, cause=None, **more):
    defaults = {"start_s": 2000.0, "end_s": 8995.0 if state.ended else None, "granted": Granted(nodes="n1")}
    return JobSnapshot("7", state, cause, **(defaults | more))


def ended(cause, **more):
    return job(JobState.DONE if cause is EndCause.COMPLETED else JobState.FAILED, cause, **more)


def see(run, snapshot, found=None, rules=RULES, now_s=NOW, **more):
    return advance(run, Observation(now_s, snapshot, found, **more), rules)


def settled(run, snapshot, found, rules=RULES, now_s=NOW):
    """See the same for longer than evidence may be late."""
    run, action = see(run, snapshot, found, rules, now_s)
    return see(run, snapshot, found, rules, now_s + rules.evidence_s) if isinstance(action, Watch) else (run, action)


# ------------------------------------------------------------------------------------ what each cause means


def test_every_cause_has_its_recovery():
    assert set(RECOVERY) == set(EndCause)


NOT_ITS_FAULT = [
    EndCause.PREEMPTED, EndCause.DISRUPTED, EndCause.NODE_FAIL, EndCause.BOOT_FAIL, EndCause.TIMEOUT,
]  # fmt: skip


@pytest.mark.parametrize("cause", NOT_ITS_FAULT)
def test_an_end_that_is_not_the_users_goes_on_at_once_for_ever_while_each_run_brings_a_newer_checkpoint(cause):
    run = RUN
    for attempt in range(2, 50):
        run, action = see(run, ended(cause), at_step(10 * attempt))
        assert action == Submit()
        assert (run.phase, run.job_id, run.without_progress, run.unproven) == (Phase.WAITING, "", 0, 0)
        run = watching(submitting(run, attempt, "n", NOW, 10 * attempt), "7")
    assert run.preemptions == (48 if cause is EndCause.PREEMPTED else 0)
    assert [row.cause for row in run.history] == [cause] * 32


@pytest.mark.parametrize(
    ("cause", "retry", "words"),
    [
        (EndCause.NONZERO_EXIT, True, "failed with exit code 3"),
        (EndCause.OUT_OF_MEMORY, True, "ran out of memory"),
        (EndCause.DEADLINE, False, "missed its deadline on the cluster"),
        (EndCause.CANCELLED, False, "was cancelled on the cluster"),
        (EndCause.CONFIG, False, "config"),
    ],
)
def test_an_end_of_the_users_fails_in_words_and_spends_a_retry_only_where_that_may_help(cause, retry, words):
    run, action = settled(RUN, ended(cause, exit_code=3), at_step(99))
    assert (action.cause, action.retry) == (cause, retry)
    assert action.message.startswith(f"job 7 of {RUN.key.name} on dgx {words}")
    assert action.message.endswith("(node n1)")
    assert (run.phase, run.outcome) == (Phase.DONE, cause)


@pytest.mark.parametrize(
    ("who", "when", "words"),
    [
        ("alice (uid 1000)", 1796118338.0, "was cancelled on the cluster by alice (uid 1000) at 2026-12-01T09:45:38Z"),
        ("", 1796118338.0, "was cancelled on the cluster at 2026-12-01T09:45:38Z"),
        ("root (uid 0)", None, "was cancelled on the cluster by root (uid 0) (node n1)"),
        ("", 1e18, "at 1000000000000000000 s after 1970"),
    ],
)
def test_a_cancelled_job_says_who_and_when(who, when, words):
    _, action = see(RUN, ended(EndCause.CANCELLED, cancelled_by=who, end_s=when), NOWHERE)
    assert words in action.message


def test_a_gangs_failure_names_code_and_rank():
    left = at_step(10, marker(0, exit_code=85, notice_s=8991.0), marker(1, exit_code=3))
    _, action = see(RUN, ended(EndCause.NONZERO_EXIT, exit_code=85), left, GANG)
    assert "failed with exit code 3 on rank 1" in action.message
    assert action.retry


def test_a_finished_run_succeeds_and_is_recorded():
    run, action = see(RUN, ended(EndCause.COMPLETED, exit_code=0), at_step(50, done(step=50)))
    assert action == Succeed()
    assert (run.phase, run.outcome) == (Phase.DONE, "succeeded")
    assert run.history == (
        Attempt(
            1, "7", "completed", 0, submitted_s=1000.0, start_s=2000.0, end_s=8995.0, start_step=10, step=50, nodes="n1"
        ),
    )


def test_node_fail_after_every_rank_declared_its_end_is_a_success():
    assert see(RUN, ended(EndCause.NODE_FAIL), at_step(50, done()))[1] == Succeed()


def test_a_command_that_ran_without_jobside_succeeds_by_the_clusters_word():
    assert see(RUN, ended(EndCause.COMPLETED, exit_code=0), at_step(None, plain=True))[1] == Succeed()


@pytest.mark.parametrize("notice_exit", [0, 85, 143, 1])
def test_a_preempted_training_that_left_within_its_grace_is_resumed_though_2205_calls_it_completed_or_failed(
    notice_exit,
):
    cause = EndCause.NONZERO_EXIT if notice_exit else EndCause.COMPLETED
    left = at_step(20, marker(exit_code=notice_exit or 85, notice_s=8980.0, step=20))
    run, action = see(RUN, ended(cause, exit_code=notice_exit), left)
    assert action == Submit()
    assert run.preemptions == 1


# ------------------------------------------------------------------------------------ late evidence


def test_completed_without_evidence_waits_for_it_and_is_then_a_launch_that_failed():
    run, action = see(RUN, ended(EndCause.COMPLETED, exit_code=0), at_step(10))
    assert action == Watch()
    run, action = see(run, ended(EndCause.COMPLETED, exit_code=0), at_step(10), now_s=NOW + 59)
    assert action == Watch()
    run, action = see(run, ended(EndCause.COMPLETED, exit_code=0), at_step(10), now_s=NOW + 60)
    assert action == Submit()
    assert run.history[-1].cause == "launch_failed"


def test_a_marker_that_a_shared_file_system_shows_late_still_decides():
    run, _ = see(RUN, ended(EndCause.NONZERO_EXIT, exit_code=85), at_step(10))
    assert see(run, ended(EndCause.NONZERO_EXIT, exit_code=85), at_step(10, done()), now_s=NOW + 50)[1] == Succeed()


def test_a_noticed_rank_does_not_decide_before_the_crashed_one_is_seen():
    first = marker(0, exit_code=85, notice_s=8991.0)
    run, action = see(RUN, ended(EndCause.NONZERO_EXIT, exit_code=85), at_step(10, first), GANG)
    assert action == Watch()
    both = at_step(10, first, marker(1, exit_code=3))
    _, action = see(run, ended(EndCause.NONZERO_EXIT, exit_code=85), both, GANG, NOW + 2)
    assert action.cause is EndCause.NONZERO_EXIT


@pytest.mark.parametrize(
    ("snapshot", "found"),
    [
        (ended(EndCause.COMPLETED), None),
        (replace(ended(EndCause.COMPLETED), detailed=False), at_step(10, done())),
    ],
    ids=["nobody has looked", "only the state was asked"],
)
def test_an_end_is_not_decided_before_details_and_a_look(snapshot, found):
    run, action = see(RUN, snapshot, found, now_s=NOW)
    assert action == Watch()
    assert see(run, snapshot, found, now_s=NOW + 1000)[1] == Watch()


def test_completing_then_requeued_then_pending_is_no_end():
    run, _ = see(RUN, ended(EndCause.COMPLETED), at_step(10))
    for snapshot in (
        job(JobState.RUNNING, raw="COMPLETING"),
        job(JobState.REQUEUED, restarts=1),
        job(JobState.QUEUED, restarts=1),
    ):
        run, action = see(run, snapshot, None, now_s=NOW + 100)
        assert action == Watch()
        assert run.ended_since_s is None
    assert run.restarts == 1


def test_a_lack_of_progress_does_not_fail_the_task_while_a_marker_is_on_its_way():
    run, action = see(RUN, ended(EndCause.TIMEOUT), at_step(10))
    assert action == Watch()
    run, action = see(run, ended(EndCause.TIMEOUT), at_step(10, marker(exit_code=85, notice_s=1.0, step=20)))
    assert action == Submit()


# ------------------------------------------------------------------------------------ budgets


def attempts(run, rules, found, cause=EndCause.PREEMPTED, step=10):
    """Resume with the same end until something else comes."""
    for number in range(2, 1000):
        run, action = settled(run, ended(cause), found, rules)
        if action != Submit():
            return number - 2, action
        run = watching(submitting(run, number, "n", NOW, step), "7")
    raise AssertionError("it never ended")


def test_resumes_without_a_newer_checkpoint_are_budgeted_and_end_in_a_clear_error():
    times, action = attempts(RUN, RULES, at_step(10))
    assert times == 3
    assert (action.cause, action.retry) == (EndCause.PREEMPTED, False)
    assert "resumed 3 times in a row without a newer checkpoint (the newest is still of step 10)" in action.message


def test_without_any_checkpoint_the_error_says_so():
    run = replace(RUN, start_step=None)
    assert "(there is no checkpoint)" in attempts(run, RULES, at_step(None), step=None)[1].message


def test_resumes_whose_checkpoint_nobody_can_see_have_a_budget_of_their_own():
    times, action = attempts(RUN, RULES, NOWHERE)
    assert times == 20
    assert "resumed 20 times in a row without anyone being able to see its checkpoints" in action.message
    assert not action.retry


def test_a_task_without_checkpoints_is_started_again_within_the_budget_whatever_lies_there():
    times, action = attempts(RUN, replace(RULES, checkpointed=False), at_step(99))
    assert times == 3
    assert "the budget (without_progress) for a task without checkpoints" in action.message


def test_progress_gives_the_budgets_back():
    run = replace(RUN, without_progress=3, unproven=20)
    run, action = see(run, ended(EndCause.PREEMPTED), at_step(11))
    assert (action, run.without_progress, run.unproven) == (Submit(), 0, 0)


def test_a_checkpoint_that_airflow_cannot_see_is_proved_by_the_marker():
    run, _ = see(RUN, ended(EndCause.PREEMPTED), replace(NOWHERE, markers=(marker(notice_s=1.0, step=20),)))
    assert (run.without_progress, run.unproven, run.history[-1].step) == (0, 0, 20)


@pytest.mark.parametrize(
    "left",
    [
        pytest.param(replace(NOWHERE, markers=(marker(notice_s=1.0, start_step=40, step=40),)), id="the job says it"),
        pytest.param(replace(NOWHERE, markers=(marker(notice_s=1.0, step=40),)), id="the attempt before ended there"),
    ],
)
def test_a_start_that_airflow_could_not_see_does_not_make_everything_progress(left):
    run = replace(RUN, start_step=None)
    times, action = attempts(run, RULES, left, step=None)
    assert times <= 4
    assert "without a newer checkpoint" in action.message


def test_a_timeout_without_a_newer_checkpoint_ends_at_the_first_time_and_names_the_step():
    left = at_step(10, marker(exit_code=85, notice_s=1.0, step=10))
    run, action = see(RUN, ended(EndCause.TIMEOUT), left)
    assert (action.cause, action.retry, run.outcome) == (EndCause.TIMEOUT, False, "timeout")
    assert "reached its walltime limit" in action.message
    assert "the newest is of step 10" in action.message


def test_a_timeout_with_no_checkpoint_at_all_says_so():
    _, action = settled(RUN, ended(EndCause.TIMEOUT), at_step(None))
    assert "there was no checkpoint" in action.message


def test_a_timeout_whose_checkpoint_nobody_can_see_is_not_taken_for_one_without():
    run, action = see(RUN, ended(EndCause.TIMEOUT), NOWHERE)
    assert (action, run.unproven) == (Submit(), 1)


def test_a_timeout_of_a_task_without_checkpoints_is_the_users_to_mend():
    _, action = see(RUN, ended(EndCause.TIMEOUT), NOWHERE, replace(RULES, checkpointed=False))
    assert (action.cause, action.retry) == (EndCause.TIMEOUT, True)


def test_exit_0_after_the_walltime_notice_goes_on_while_there_is_progress_and_only_then():
    rules = replace(RULES, walltime_notice_s=120.0)
    snapshot = ended(EndCause.COMPLETED, exit_code=0, granted=Granted(time_limit_s=7000))
    noticed = marker(exit_code=85, notice_s=8900.0, step=20)
    assert see(RUN, snapshot, at_step(20, noticed), rules)[1] == Submit()
    assert see(RUN, snapshot, at_step(10, replace(noticed, step=10)), rules)[1].cause is EndCause.TIMEOUT


# ------------------------------------------------------------------------------------ lost jobs


def test_a_job_that_the_cluster_forgot_is_lost_after_a_while_and_its_processes_may_live_on():
    run, action = see(RUN, None, NOWHERE)
    assert action == Watch()
    run, action = see(run, None, NOWHERE, now_s=NOW + 299)
    assert action == Watch()
    run, action = see(run, None, NOWHERE, now_s=NOW + 300)
    assert action == Submit()
    assert (run.history[-1].cause, run.fence) == ("lost", True)


def test_nobody_needs_to_have_looked_for_a_job_to_be_lost():
    run, _ = see(RUN, None)
    assert see(run, None, now_s=NOW + 300)[1] == Submit()


def test_a_job_that_turns_up_again_was_not_lost():
    run, _ = see(RUN, None)
    run, _ = see(run, job(JobState.RUNNING), now_s=NOW + 200)
    assert see(run, None, now_s=NOW + 400)[1] == Watch()


@pytest.mark.parametrize(
    ("left", "cause"),
    [
        (marker(exit_code=3), EndCause.NONZERO_EXIT),
        (marker(exit_code=85, notice_s=5000.0, step=10), EndCause.PREEMPTED),
        (marker(exit_code=85, notice_s=8900.0, step=10), EndCause.TIMEOUT),
    ],
)
def test_of_a_job_that_the_cluster_forgot_the_markers_decide_at_once(left, cause):
    rules = replace(RULES, walltime_notice_s=120.0)
    run, _ = see(RUN, job(JobState.RUNNING, granted=Granted(time_limit_s=7000)), None, rules)
    run, _ = see(run, None, at_step(10, left), rules)
    assert run.history[-1].cause == cause


def test_a_failed_job_whose_record_is_gone_is_never_a_success_without_its_markers():
    assert see(RUN, None, at_step(50, done()))[1] == Succeed()
    run, _ = see(RUN, None, at_step(50, plain=True))
    assert see(run, None, at_step(50, plain=True), now_s=NOW + 300)[1] == Submit()


def test_a_job_that_we_stopped_and_that_is_gone_ended_by_what_we_stopped_it_for():
    run, _ = see(replace(RUN, stopping="disrupted"), None, NOWHERE)
    run, _ = see(run, None, NOWHERE, now_s=NOW + 300)
    assert run.history[-1].cause == "disrupted"


# ------------------------------------------------------------------------------------ bad luck


def test_an_attempt_that_its_node_ended_at_once_keeps_away_from_it_and_waits_with_growing_delay():
    run, delays = RUN, []
    for number in range(2, 13):
        snapshot = ended(EndCause.BOOT_FAIL, start_s=8990.0, granted=Granted(nodes=f"n{number}"))
        run, action = see(run, snapshot, at_step(10 * number))
        delays.append(action.until_s - NOW)
        assert run.not_before_s == action.until_s
        assert see(run, None, now_s=action.until_s - 1) == (run, action)
        assert see(run, None, now_s=action.until_s)[1] == Submit()
        run = watching(submitting(run, number, "n", NOW, 10 * number), "7")
    assert delays == [5, 10, 20, 40, 80, 160, 320, 600, 600, 600, 600]
    assert run.excluded == tuple(f"n{number}" for number in range(2, 13))


def test_the_newest_16_bad_nodes_are_kept_away_from_and_none_twice():
    run = RUN
    for number in (*range(20), 19):
        snapshot = ended(EndCause.NODE_FAIL, start_s=8990.0, granted=Granted(nodes=f"n{number}"))
        run, _ = see(run, snapshot, at_step(10 * number + 20))
        run = watching(submitting(run, number, "n", NOW, 10), "7")
    assert run.excluded == tuple(f"n{number}" for number in range(4, 20))


@pytest.mark.parametrize("nodes", ["", "n[1-2]", "n1,n2"])
def test_of_several_nodes_none_is_known_to_be_the_bad_one(nodes):
    snapshot = ended(EndCause.NODE_FAIL, start_s=8990.0, granted=Granted(nodes=nodes))
    run, action = see(RUN, snapshot, at_step(20))
    assert (run.excluded, action) == ((), Watch(NOW + 5))


@pytest.mark.parametrize(("cause", "start_s"), [(EndCause.NODE_FAIL, 8935.0), (EndCause.PREEMPTED, 8990.0)])
def test_an_attempt_that_was_not_unlucky_clears_the_slate(cause, start_s):
    run = replace(RUN, unlucky=4, excluded=("n1",))
    run, action = see(run, ended(cause, start_s=start_s), at_step(20))
    assert (run.unlucky, run.excluded, action) == (0, (), Submit())


def test_very_much_bad_luck_does_not_overflow():
    run = replace(RUN, unlucky=5000)
    assert see(run, ended(EndCause.NODE_FAIL, start_s=8990.0), at_step(20))[1] == Watch(NOW + 600)


def test_nobody_waits_beyond_the_deadline():
    rules = replace(RULES, deadline_s=NOW + 100)
    run = replace(RUN, unlucky=7)
    assert see(run, ended(EndCause.NODE_FAIL, start_s=8990.0), at_step(20), rules)[1] == Watch(NOW + 100)


@pytest.mark.parametrize("cause", [*NOT_ITS_FAULT, EndCause.LAUNCH_FAILED])
def test_only_after_a_lost_node_processes_of_the_attempt_before_may_live_on(cause):
    run, _ = settled(RUN, ended(cause), at_step(20))
    assert run.fence is (cause is EndCause.NODE_FAIL)


# ------------------------------------------------------------------------------------ before and after a job


@pytest.mark.parametrize("run", [Run(TASK), submitting(Run(TASK), 1, "n", 1.0, None), waiting(Run(TASK), NOW)])
def test_a_run_without_a_job_is_to_be_submitted_when_its_time_has_come(run):
    assert see(run, None) == (run, Submit())


def test_a_run_whose_time_has_not_come_waits():
    run = replace(submitting(Run(TASK), 1, "n", 1.0, None), not_before_s=NOW + 5)
    assert see(run, None) == (run, Watch(NOW + 5))


@pytest.mark.parametrize("outcome", ["succeeded", "cancelled", "deadline"])
def test_a_run_that_is_done_stays_done(outcome):
    run = replace(RUN, phase=Phase.DONE, outcome=outcome)
    after, action = see(run, job(JobState.RUNNING), rules=replace(RULES, deadline_s=1.0))
    assert after == run
    if outcome == "succeeded":
        assert action == Succeed()
    else:
        assert (action.cause, action.retry) == (EndCause(outcome), False)


def test_recovery_is_a_word_for_the_table_in_the_documentation():
    assert f"{Recovery.RESUME_IF_PROGRESS}" == "resume_if_progress"


@pytest.mark.parametrize("snapshot", [None, job(JobState.RUNNING), ended(EndCause.PREEMPTED)])
def test_past_the_deadline_the_job_is_cancelled_and_the_task_fails_for_good(snapshot):
    run, action = see(RUN, snapshot, at_step(20), replace(RULES, deadline_s=NOW))
    assert isinstance(action, Cancel)
    assert (action.failure.cause, action.failure.retry) == (EndCause.DEADLINE, False)
    assert "the task's deadline has passed" in action.failure.message
    assert (run.phase, run.outcome) == (Phase.DONE, "deadline")


def test_past_the_deadline_there_may_be_no_job_to_cancel():
    _, action = see(Run(TASK), None, rules=replace(RULES, deadline_s=NOW))
    assert isinstance(action, Fail)
    assert "(not submitted)" in action.message


def test_an_end_that_came_before_the_deadline_counts_even_where_it_is_seen_after_it():
    rules = replace(RULES, deadline_s=NOW - 1)
    assert see(RUN, ended(EndCause.COMPLETED), at_step(50, done()), rules)[1] == Succeed()
    assert see(RUN, ended(EndCause.CANCELLED), at_step(50), rules)[1].cause is EndCause.CANCELLED


@pytest.mark.parametrize("kept", [None, NOW + 1])
def test_before_the_deadline_it_does_not_matter(kept):
    assert see(RUN, job(JobState.RUNNING), rules=replace(RULES, deadline_s=kept))[1] == Watch()
