"""What must survive a crash survives it, and what belongs to one attempt does not outlive it."""

from __future__ import annotations

import json
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_profsched.core.evidence import Submission
from airflow_profsched.core.jobs import EndCause, Granted, JobKey, TaskKey
from airflow_profsched.core.run import Attempt, Phase, Run, recorded, stopped_for, submitting, waiting, watching

TASK = TaskKey("dag", "run", "train", 3, "prod")
SECONDS = st.none() | st.floats(allow_nan=False, allow_infinity=False)
STEPS = st.none() | st.integers(0)
GRANTED = st.builds(Granted, st.text(), st.text(), st.none() | st.integers(), st.text())
ATTEMPTS = st.builds(
    Attempt,
    st.integers(1),
    st.text(),
    st.sampled_from(EndCause).map(str),
    STEPS,
    SECONDS,
    SECONDS,
    SECONDS,
    STEPS,
    STEPS,
)
RUNS = st.builds(
    Run,
    task=st.just(TASK),
    phase=st.sampled_from(Phase),
    attempt=st.integers(0),
    job_id=st.text(),
    start_step=STEPS,
    started_s=SECONDS,
    granted=GRANTED,
    stopping=st.sampled_from(["", *EndCause]).map(str),
    adopted=st.booleans(),
    missing_since_s=SECONDS,
    excluded=st.lists(st.text(), max_size=3).map(tuple),
    fence=st.booleans(),
    history=st.lists(ATTEMPTS, max_size=3).map(tuple),
)
BUSY = Run(
    TASK, Phase.WATCHING, 2, "7", "n", 10.0, 4, restarts=1, started_s=11.0, granted=Granted("q"), stopping="lost",
    adopted=True, missing_since_s=1.0, ended_since_s=2.0, marked_since_s=3.0, preemptions=5, without_progress=1,
    unproven=2, unlucky=3, excluded=("n1",), fence=True,
)  # fmt: skip


@given(RUNS)
def test_a_run_comes_back_from_json_as_it_was(run):
    assert Run.from_json(json.loads(json.dumps(run.to_json()))) == run


def test_fields_of_a_newer_version_are_passed_over_everywhere():
    body = recorded(BUSY, Attempt(1, "6", "preempted")).to_json()
    for part in (body, body["task"], body["granted"], body["history"][0]):
        part["brand_new"] = 1
    assert Run.from_json(body) == recorded(BUSY, Attempt(1, "6", "preempted"))


def test_a_record_of_an_older_version_is_read_with_defaults():
    assert Run.from_json({"task": {"dag_id": "dag", "run_id": "run", "task_id": "train"}}) == Run(
        TaskKey("dag", "run", "train")
    )


OF_ONE_ATTEMPT = {
    "job_id": "", "restarts": 0, "started_s": None, "granted": Granted(), "stopping": "", "adopted": False,
    "missing_since_s": None, "ended_since_s": None, "marked_since_s": None,
}  # fmt: skip


@pytest.mark.parametrize(
    ("step", "changes"),
    [
        (
            lambda run: submitting(run, 3, "m", 20.0, 5),
            {"phase": Phase.SUBMITTING, "attempt": 3, "nonce": "m", "submitted_s": 20.0, "start_step": 5},
        ),
        (lambda run: waiting(run, 30.0), {"phase": Phase.WAITING, "not_before_s": 30.0}),
    ],
    ids=["submitting", "waiting"],
)
def test_what_belongs_to_one_attempt_ends_with_it_and_budgets_and_bad_luck_do_not(step, changes):
    assert step(BUSY) == replace(BUSY, **(OF_ONE_ATTEMPT | changes))


@pytest.mark.parametrize("adopted", [False, True])
def test_a_job_is_watched_as_what_it_is_and_the_fence_is_spent(adopted):
    run = watching(submitting(BUSY, 3, "m", 20.0, None), "8", adopted=adopted)
    assert (run.phase, run.job_id, run.adopted, run.fence) == (Phase.WATCHING, "8", adopted, False)


def test_the_history_keeps_the_newest_32():
    run = BUSY
    for number in range(40):
        run = recorded(run, Attempt(number, str(number), "preempted"))
    assert [attempt.attempt for attempt in run.history] == list(range(8, 40))


def test_the_key_names_the_newest_attempt():
    assert BUSY.key == JobKey(TASK, 2)


def test_a_submission_tells_its_markers_from_those_of_another_job_submission_or_start():
    assert BUSY.submission(4, 120.0) == Submission("7", "n", 4, 120.0, restarts=1)


@pytest.mark.parametrize(("stopping", "cause"), [("", None), ("disrupted", EndCause.DISRUPTED)])
def test_why_we_stopped_it_is_a_cause(stopping, cause):
    assert stopped_for(replace(BUSY, stopping=stopping)) is cause


def test_every_field_is_described():
    assert all(f"{field.name}:" in Run.__doc__ for field in fields(Run))
