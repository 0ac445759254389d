"""How jobs are called: names that are unique, stay within the clusters' lengths, and harm no path and no command."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_profsched.core.jobs import EndCause, JobKey, JobState, TaskKey, safe_segment

IDS = st.text(max_size=300)
KEYS = st.builds(TaskKey, IDS, IDS, IDS, st.integers(-1, 10_000), IDS)


@pytest.mark.parametrize("state", JobState)
def test_only_done_and_failed_are_ends(state):
    assert state.ended is (state in (JobState.DONE, JobState.FAILED))


def test_states_and_causes_are_words_in_json_and_in_messages():
    assert f"{JobState.QUEUED_HELD} {EndCause.NODE_FAIL}" == "queued_held node_fail"


@given(KEYS, st.integers(1, 9_999_999))
def test_names_fit_a_label_of_kubernetes_and_a_job_name_of_slurm(task, attempt):
    label = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
    assert re.fullmatch(label, task.name)
    assert len(task.name) <= 46
    name = JobKey(task, attempt).name
    assert re.fullmatch(label, name)
    assert len(name) <= 54


@given(KEYS, KEYS)
def test_two_task_instances_never_share_a_name_or_a_directory(one, other):
    assert (one == other) == (one.name == other.name) == (one.path == other.path)


def test_a_thousand_mapped_tasks_have_a_thousand_names_and_directories():
    tasks = [TaskKey("score_" + "x" * 200, "run", "batch", index) for index in range(1000)]
    assert len({task.name for task in tasks}) == len({task.path for task in tasks}) == 1000


def test_the_name_is_the_same_for_every_attempt_and_the_key_is_not():
    task = TaskKey("dag", "run", "group.train")
    assert re.fullmatch(r"dag-group-train-[0-9a-f]{12}", task.name)
    assert [JobKey(task, number).name for number in (1, 2)] == [f"{task.name}-1", f"{task.name}-2"]


def test_a_name_without_a_letter_is_still_a_name():
    assert re.fullmatch(r"x-x-[0-9a-f]{12}", TaskKey("Ω", "run", "…").name)


@pytest.mark.parametrize(("index", "part"), [(-1, "unmapped"), (0, "0"), (17, "17")])
def test_the_path_says_which_mapped_task_it_is(index, part):
    task = TaskKey("dag", "run", "train", index)
    assert task.path == f"dag/train/{part}/{task.digest}"


@pytest.mark.parametrize("text", ["train", "my_dag.v2", "a=b-c", "_x", "x" * 80])
def test_a_harmless_id_is_its_own_directory(text):
    assert safe_segment(text) == text


@pytest.mark.parametrize(
    "text", ["", ".", "..", ".hidden", "-rf", "a/b", "a b", "a\nb", "x" * 81, "é", "mailbox", "\0"]
)
def test_an_id_that_could_do_harm_becomes_a_slug_with_a_hash(text):
    assert re.fullmatch(r"[a-z0-9][a-z0-9-]{0,15}~[0-9a-f]{12}", safe_segment(text))


@given(st.text() | st.text(alphabet=st.characters(codec=None, categories=["Cs"]), max_size=3))
def test_a_segment_holds_no_separator_and_is_no_option_and_stays_below_its_root(text):
    segment = safe_segment(text)
    assert re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.=~-]{0,79}", segment)


@given(st.text(max_size=4), st.text(max_size=4))
def test_different_ids_have_different_segments(one, other):
    assert (one == other) == (safe_segment(one) == safe_segment(other))
