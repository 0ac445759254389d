"""What an attempt left behind, and what it proves: the tables of facts/slurm.md ("Evidence") and of the design, §4."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_profsched.core.evidence import (
    CheckpointView,
    EndMarker,
    Findings,
    Submission,
    all_ended,
    findings_from_json,
    may_still_come,
    own_markers,
    settle,
    settle_unknown,
)
from airflow_profsched.core.jobs import EndCause, Granted, JobSnapshot, JobState

OWN = Submission("7", "n", 1)
GANG = replace(OWN, ranks=2)
UNSEEN = CheckpointView(visible=False)


def marker(rank=0, *, exit_code=0, notice_s=None, **more):
    defaults = {"ranks": 1, "nonce": "n", "job_id": "7", "restart": 0, "ended_s": 100.0}
    return EndMarker(rank=rank, exit_code=exit_code, notice_s=notice_s, **(defaults | more))


def done(rank=0, **more):
    return marker(rank, done=True, **more)


def ended(cause, **more):
    state = JobState.DONE if cause is EndCause.COMPLETED else JobState.FAILED
    return JobSnapshot("7", state, cause, **more)


def found(*markers, plain=False, checkpoint=UNSEEN):
    return Findings(markers, plain, checkpoint)


SAVED = marker(exit_code=85, notice_s=90.0)
CRASHED = marker(exit_code=3)


@pytest.mark.parametrize(
    ("seen", "left", "cause"),
    [
        # (1) state PREEMPTED, or PreemptTime set, also with `CANCELLED by 0`
        pytest.param(ended(EndCause.PREEMPTED), found(SAVED), EndCause.PREEMPTED, id="PREEMPTED"),
        pytest.param(ended(EndCause.PREEMPTED), found(), EndCause.PREEMPTED, id="PREEMPTED, killed without a marker"),
        pytest.param(
            ended(EndCause.COMPLETED, preempt_s=9.0), found(), EndCause.PREEMPTED, id="COMPLETED, PreemptTime"
        ),
        pytest.param(
            ended(EndCause.NONZERO_EXIT, preempt_s=9.0, exit_code=1),
            found(),
            EndCause.PREEMPTED,
            id="FAILED, PreemptTime",
        ),
        pytest.param(
            ended(EndCause.CANCELLED, preempt_s=9.0, cancelled_by="root"),
            found(SAVED),
            EndCause.PREEMPTED,
            id="CANCELLED by 0, PreemptTime",
        ),
        # (2) as they say: a scancel sends TERM too, its notice is no preemption
        *(
            pytest.param(ended(cause), found(SAVED), cause, id=f"{cause} beside a notice")
            for cause in (
                EndCause.NODE_FAIL,
                EndCause.TIMEOUT,
                EndCause.OUT_OF_MEMORY,
                EndCause.BOOT_FAIL,
                EndCause.DEADLINE,
                EndCause.CANCELLED,
                EndCause.DISRUPTED,
                EndCause.CONFIG,
            )
        ),
        # (3) the markers, for COMPLETED and FAILED only
        pytest.param(ended(EndCause.COMPLETED), found(done()), EndCause.COMPLETED, id="COMPLETED, declared"),
        pytest.param(ended(EndCause.COMPLETED), found(SAVED), EndCause.PREEMPTED, id="COMPLETED after a notice, 22.05"),
        pytest.param(
            ended(EndCause.COMPLETED),
            found(marker(exit_code=0, notice_s=9.0)),
            EndCause.PREEMPTED,
            id="COMPLETED after a notice, exit 0, not declared",
        ),
        pytest.param(
            ended(EndCause.NONZERO_EXIT, exit_code=85), found(SAVED), EndCause.PREEMPTED, id="FAILED 85, notice"
        ),
        pytest.param(
            ended(EndCause.NONZERO_EXIT, exit_code=1),
            found(marker(exit_code=1, notice_s=9.0, step=5)),
            EndCause.PREEMPTED,
            id="FAILED 1 after a notice: torchrun turns its children's codes into its own",
        ),
        pytest.param(
            ended(EndCause.NONZERO_EXIT, exit_code=85),
            found(marker(exit_code=85)),
            EndCause.CHECKPOINTED,
            id="85 without a notice: it saved and left by itself",
        ),
        pytest.param(ended(EndCause.COMPLETED), found(CRASHED), EndCause.NONZERO_EXIT, id="COMPLETED, but exit 3"),
        # (4) the exit code
        pytest.param(
            ended(EndCause.NONZERO_EXIT, exit_code=85), found(), EndCause.CHECKPOINTED, id="FAILED 85, no marker"
        ),
        pytest.param(
            ended(EndCause.NONZERO_EXIT, exit_code=2), found(), EndCause.NONZERO_EXIT, id="FAILED 2, no marker"
        ),
        pytest.param(ended(EndCause.LAUNCH_FAILED), found(), EndCause.LAUNCH_FAILED, id="never launched"),
        pytest.param(ended(EndCause.COMPLETED, exit_code=0), found(), None, id="COMPLETED alone is no evidence"),
        pytest.param(
            ended(EndCause.COMPLETED, exit_code=0), found(plain=True), EndCause.COMPLETED, id="COMPLETED 0, no python3"
        ),
        pytest.param(ended(EndCause.COMPLETED), found(plain=True), None, id="COMPLETED without a code, no python3"),
        pytest.param(
            ended(EndCause.COMPLETED, exit_code=0),
            found(marker(), plain=True),
            None,
            id="a marker that is not done outweighs `plain`",
        ),
        pytest.param(JobSnapshot("7", JobState.FAILED), found(SAVED), None, id="an end without a cause"),
    ],
)
def test_the_first_evidence_that_fits_decides(seen, left, cause):
    assert settle(seen, left, OWN).cause is cause


@pytest.mark.parametrize("cause", [cause for cause in EndCause if cause is not EndCause.COMPLETED])
def test_a_run_that_every_rank_declared_finished_is_a_success_whatever_was_on_its_way_to_the_job(cause):
    verdict = settle(ended(cause, exit_code=9), found(done(0), done(1)), GANG)
    assert (verdict.cause, verdict.exit_code) == (EndCause.COMPLETED, 0)


@pytest.mark.parametrize(
    "other",
    [
        pytest.param((), id="missing"),
        pytest.param((marker(1),), id="not done"),
        pytest.param((done(1, nonce="x"),), id="of another submission"),
        pytest.param((done(1, job_id="8"),), id="of another job"),
        pytest.param((done(2),), id="of a rank that there is not"),
        pytest.param((done(-1),), id="of a negative rank"),
        pytest.param((done(0),), id="a second file that claims rank 0"),
        pytest.param((marker(1, restart=1),), id="of a later start"),
    ],
)
def test_one_rank_without_a_declared_end_of_this_very_run_is_no_success(other):
    assert settle(ended(EndCause.COMPLETED, exit_code=0), found(done(0), *other), GANG).cause is None


def test_where_two_files_claim_one_rank_the_one_that_proves_less_is_believed():
    assert own_markers(found(done(), CRASHED), OWN) == (CRASHED,)
    assert own_markers(found(CRASHED, done()), OWN) == (CRASHED,)


def test_the_earliest_rank_that_failed_before_any_notice_tells_its_code_whatever_the_others_then_did():
    # measured: exit 3 on rank 1 shows as FAILED 85:0, because -K sent TERM to rank 0, which saved
    left = found(marker(0, exit_code=85, notice_s=101.0, ended_s=103.0), marker(1, exit_code=3, ended_s=100.0))
    verdict = settle(ended(EndCause.NONZERO_EXIT, exit_code=85), left, GANG)
    assert (verdict.cause, verdict.exit_code, verdict.rank) == (EndCause.NONZERO_EXIT, 3, 1)


def test_of_two_ranks_that_failed_without_a_notice_the_earlier_decides():
    left = found(marker(0, exit_code=1, ended_s=101.0), marker(1, exit_code=3, ended_s=100.0))
    verdict = settle(ended(EndCause.NONZERO_EXIT, exit_code=1), left, GANG)
    assert (verdict.exit_code, verdict.rank) == (3, 1)


LIMITED = Granted(time_limit_s=3600)
NOTICED_WALLTIME = replace(OWN, walltime_notice_s=120.0)


@pytest.mark.parametrize(
    ("notice_s", "own", "more", "cause"),
    [  # started at 1000, so the limit is at 4600: within N + 60 s of it the notice is the walltime's
        (4600.0 - 180.0, NOTICED_WALLTIME, {}, EndCause.TIMEOUT),
        (4600.0 - 181.0, NOTICED_WALLTIME, {}, EndCause.PREEMPTED),
        (4500.0, OWN, {}, EndCause.PREEMPTED),
        (4500.0, NOTICED_WALLTIME, {"granted": Granted()}, EndCause.PREEMPTED),
        (4500.0, NOTICED_WALLTIME, {"start_s": None}, EndCause.PREEMPTED),
        (4500.0, NOTICED_WALLTIME, {"preempt_s": 4500.0}, EndCause.PREEMPTED),
    ],
)
def test_a_notice_near_the_limit_is_the_walltimes_unless_the_cluster_noted_a_preemption(notice_s, own, more, cause):
    seen = replace(ended(EndCause.COMPLETED, start_s=1000.0, granted=LIMITED), **more)
    assert settle(seen, found(marker(exit_code=85, notice_s=notice_s)), own).cause is cause


@pytest.mark.parametrize(
    ("left", "step", "visible"),
    [
        (found(), None, False),
        (found(checkpoint=CheckpointView(visible=True)), None, True),
        (found(checkpoint=CheckpointView(visible=True, step=3)), 3, True),
        (found(marker(step=5)), 5, True),
        (found(marker(step=5), checkpoint=CheckpointView(visible=True, step=3)), 5, True),
        (found(marker(step=5, nonce="x")), None, False),
    ],
)
def test_cannot_see_is_a_value_of_its_own_and_a_marker_sees_too(left, step, visible):
    verdict = settle(ended(EndCause.PREEMPTED), left, OWN)
    assert (verdict.step, verdict.visible) == (step, visible)


def test_the_step_that_the_program_started_from_is_told_by_its_markers():
    left = found(marker(0, start_step=4), marker(1))
    assert settle(ended(EndCause.PREEMPTED), left, GANG).start_step == 4


def test_only_the_markers_of_the_newest_start_count():
    old = (done(0, restart=0), done(1, restart=0))
    assert own_markers(found(*old, marker(0, restart=1)), GANG) == (marker(0, restart=1),)
    assert all_ended(found(*old), GANG)
    assert not all_ended(found(*old), replace(GANG, restarts=1))


# ------------------------------------------------------------------------------------ unknown to the cluster


@pytest.mark.parametrize(
    ("left", "cause"),
    [
        (found(), None),
        (found(done()), EndCause.COMPLETED),
        (found(CRASHED), EndCause.NONZERO_EXIT),
        (found(SAVED), EndCause.PREEMPTED),
        (found(marker(exit_code=85, notice_s=4500.0)), EndCause.TIMEOUT),
        (found(marker()), None),
        (found(plain=True), None),
    ],
)
def test_of_a_job_that_the_cluster_does_not_know_the_markers_alone_tell(left, cause):
    last = JobSnapshot("7", JobState.UNDETERMINED, start_s=1000.0, granted=LIMITED)
    assert settle_unknown(last, left, NOTICED_WALLTIME).cause is cause


@pytest.mark.parametrize(
    ("seen", "left", "own", "waits"),
    [
        pytest.param(ended(EndCause.COMPLETED), found(), OWN, True, id="COMPLETED without a marker"),
        pytest.param(ended(EndCause.COMPLETED), found(done()), OWN, False, id="every marker is there"),
        pytest.param(ended(EndCause.NONZERO_EXIT, exit_code=85), found(SAVED), GANG, True, id="a rank is missing"),
        pytest.param(ended(EndCause.NONZERO_EXIT, exit_code=1), found(plain=True), OWN, False, id="no jobside"),
        pytest.param(ended(EndCause.COMPLETED, exit_code=0), found(plain=True), OWN, False, id="no jobside, 0"),
        pytest.param(ended(EndCause.PREEMPTED), found(), OWN, False, id="the cluster's own cause stands"),
        pytest.param(ended(EndCause.COMPLETED, preempt_s=1.0), found(), OWN, False, id="PreemptTime stands"),
        pytest.param(ended(EndCause.LAUNCH_FAILED), found(), OWN, False, id="what never ran leaves nothing"),
    ],
)
def test_an_end_waits_for_markers_only_where_they_could_change_the_verdict(seen, left, own, waits):
    assert may_still_come(seen, left, own) is waits


# ------------------------------------------------------------------------------------ what a job wrote


WHOLE = {
    "version": 1, "key": "k-1", "job_id": "7", "restart": 0, "nonce": "n", "rank": 0, "ranks": 2, "host": "node1",
    "exit_code": 85, "program_exit": 0, "signal": None, "started_s": 1.0, "ended_s": 2, "notice_s": 1.5,
    "notice_signal": 15, "killed": True, "fenced": True, "done": True, "result": False, "start_step": 4, "step": 5,
    "checkpoint": "/c/step-5",
}  # fmt: skip


def read(*markers, **more):
    return findings_from_json(json.dumps({"markers": list(markers), **more}))


def test_the_reply_to_a_look_is_read():
    look = {
        "plain": True,
        "checkpoint": {"visible": True, "path": "/c/step-5", "step": 5, "error": ""},
        "heartbeat_s": 1.0,
        "strange": ["rank-1.end is a symbolic link: not followed"],
    }
    assert read(WHOLE, **look) == Findings(
        (
            EndMarker(
                0, 2, "n", "7", 0, 85, 2.0, notice_s=1.5, killed=True, fenced=True, done=True, start_step=4, step=5,
                checkpoint="/c/step-5", host="node1",
            ),
        ),
        plain=True,
        checkpoint=CheckpointView(visible=True, step=5, path="/c/step-5"),
        strange=("rank-1.end is a symbolic link: not followed",),
    )  # fmt: skip


def test_a_look_that_found_nothing_cannot_see_checkpoints():
    assert read().checkpoint == CheckpointView(visible=False)
    assert read(WHOLE | {"notice_s": None}).markers[0].notice_s is None


@pytest.mark.parametrize(
    "wrong",
    [
        *({"rank": value} for value in (None, True, "0", 1.5, [])),
        {"exit_code": "3"},
        {"nonce": 5},
        {"job_id": 7},
        *({"ended_s": value} for value in (None, False, "now", float("nan"), float("inf"), 10**400)),
        {"notice_s": "soon"},
    ],
    ids=str,
)
def test_a_marker_that_is_not_whole_is_told_and_not_believed(wrong):
    seen = read(WHOLE | wrong)
    assert seen.markers == ()
    assert "an end marker is not whole" in seen.strange[0]


@pytest.mark.parametrize("name", ["rank", "ranks", "nonce", "job_id", "restart", "exit_code", "ended_s"])
def test_a_marker_without_what_identifies_it_is_not_believed(name):
    assert read({key: value for key, value in WHOLE.items() if key != name}).markers == ()


@pytest.mark.parametrize("raw", [[], "done", 3, None])
def test_a_marker_that_is_no_mapping_is_not_believed(raw):
    assert read(raw).markers == ()


@pytest.mark.parametrize("step", [None, True, -1, "5", 1.5])
def test_a_step_that_is_no_number_of_a_step_is_none(step):
    assert read(WHOLE | {"step": step}).markers[0].step is None


@pytest.mark.parametrize("word", ["true", 1, "done", None, [1]])
def test_only_a_plain_true_declares_an_end(word):
    assert read(WHOLE | {"done": word}).markers[0].done is False


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*WHOLE, "x"]), inner, max_size=3),
    max_leaves=5,
)


@given(st.lists(JSON | st.fixed_dictionaries(dict.fromkeys(WHOLE, JSON)), max_size=3))
def test_whatever_a_job_wrote_every_marker_is_either_read_or_told(raw):
    seen = read(*raw)
    assert len(seen.markers) + len(seen.strange) == len(raw)
    settle(ended(EndCause.COMPLETED), seen, OWN)
