from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_profsched.core.jobs import EndCause, JobState
from airflow_profsched.slurm import reasons, records, states

ENDS = {
    "BOOT_FAIL": EndCause.BOOT_FAIL,
    "CANCELLED": EndCause.CANCELLED,
    "CANCELLED by 1000": EndCause.CANCELLED,
    "CANCELLED+": EndCause.CANCELLED,
    "COMPLETED": EndCause.COMPLETED,
    "DEADLINE": EndCause.DEADLINE,
    "FAILED": EndCause.NONZERO_EXIT,
    "NODE_FAIL": EndCause.NODE_FAIL,
    "OUT_OF_MEMORY": EndCause.OUT_OF_MEMORY,
    "OUT_OF_ME+": EndCause.OUT_OF_MEMORY,
    "PREEMPTED": EndCause.PREEMPTED,
    "TIMEOUT": EndCause.TIMEOUT,
}


@pytest.mark.parametrize("word", ENDS)
def test_ends(word):
    read = states.parse(word)
    assert (read.state.ended, read.cause, read.raw) == (True, ENDS[word], word)


@pytest.mark.parametrize(
    ("words", "state"),
    [
        ("PENDING", JobState.QUEUED),
        ("RUNNING", JobState.RUNNING),
        ("SUSPENDED", JobState.SUSPENDED),
        ("COMPLETING", JobState.RUNNING),
        ("COMPLETI+", JobState.RUNNING),
        (["RUNNING", "COMPLETING"], JobState.RUNNING),
        (["COMPLETED", "COMPLETING"], JobState.RUNNING),
        (["FAILED", "COMPLETING"], JobState.RUNNING),
        (["PENDING", "REQUEUED"], JobState.REQUEUED),
        (["PENDING", "REQUEUE_HOLD"], JobState.REQUEUED_HELD),
        ("REQUEUE_HOLD", JobState.REQUEUED_HELD),
        ("SPECIAL_EXIT", JobState.REQUEUED_HELD),
        ("RESV_DEL_HOLD", JobState.QUEUED_HELD),
        (["RUNNING", "CONFIGURING"], JobState.RUNNING),
        ("CONFIGURING", JobState.RUNNING),
        ("STOPPED", JobState.SUSPENDED),
        (["COMPLETED", "REVOKED"], JobState.UNDETERMINED),
        (["COMPLETED", "UPDATE_DB"], JobState.UNDETERMINED),
        ("WEDGED", JobState.UNDETERMINED),
        (["COMPLETED", "WEDGED"], JobState.UNDETERMINED),
        ("", JobState.UNDETERMINED),
        ([], JobState.UNDETERMINED),
    ],
)
def test_what_is_no_end(words, state):
    read = states.parse(words)
    assert (read.state, read.cause) == (state, None)


@given(st.one_of(st.text(), st.lists(st.text())))
def test_no_word_that_nobody_knows_is_an_end(words):
    read = states.parse(words)
    known = [words] if isinstance(words, str) else words
    firsts = [word.split()[0].upper().rstrip("+") for word in known if word.split()]
    if read.state.ended:
        assert any(base.startswith(first) for first in firsts for base in states.BASE)


def test_who_cancelled_is_read():
    assert states.parse("CANCELLED by 1000").cancelled_by == "1000"
    assert states.parse("CANCELLED by ").cancelled_by == ""


@pytest.mark.parametrize(
    "reason",
    [
        "BadConstraints", "DependencyNeverSatisfied", "InvalidAccount", "InvalidQOS", "PartitionConfig",
        "PartitionTimeLimit", "JobHoldMaxRequeue", "user env retrieval failed requeued held",
        "QOSMaxWallDurationPerJobLimit", "QOSMaxGRESPerJob", "AssocMaxCpuPerJobLimit", "QOSMaxNodePerJobLimit", "QOSMinGRES",
    ],
)  # fmt: skip
def test_what_can_never_run(reason):
    assert reasons.never(reason)


@pytest.mark.parametrize(
    "reason",
    [
        "", "Priority", "Resources", "ReqNodeNotAvail", "Reservation", "BeginTime", "Licenses", "QOSGrpGRES", "AssocGrpCpuLimit",
        "QOSMaxJobsPerUserLimit", "QOSMaxGRESPerUser", "PartitionNodeLimit", "JobHeldUser", "Dependency", "None",
    ],
)  # fmt: skip
def test_what_clears_by_itself(reason):
    assert not reasons.never(reason)


def line(**changes):
    values = dict.fromkeys(records.SQUEUE_FIELDS, "")
    values |= {"JobID": "7", "UserName": "u", "State": "RUNNING", "RestartCnt": "0", "Name": "n", "exit_code": "0"}
    return "".join(f"{(values | changes)[name]}|" for name in records.SQUEUE_FIELDS)


def test_banners_and_half_lines_are_passed_over():
    out = "Welcome to the cluster | have fun\n" + line() + "\n7|u|RUN"
    assert [record.snapshot.job_id for record in records.squeue_records(out)] == ["7"]


def test_a_comment_may_hold_bars():
    (record,) = records.squeue_records(line(Comment="a|b|c"))
    assert record.name == "n"


@pytest.mark.parametrize(
    ("shown", "code", "signal"),
    [("3:0", 3, None), ("0:15", 143, 15), ("0", 0, None), ("768", 3, None), ("", None, None)],
)
def test_exit_codes(shown, code, signal):
    (record,) = records.squeue_records(line(State="FAILED", exit_code=shown))
    assert (record.snapshot.exit_code, record.snapshot.signal) == (code, signal)


def read(out):
    records.squeue_records(out)
    records.sacct_records(out)
    records.state_records(out)
    records.found_jobs(out)


@given(st.text())
def test_no_reply_breaks_the_readers(out):
    read(out)


ODD = st.one_of(
    st.text(), st.sampled_from(["²", "٣", "9" * 30, "-1", "CANCELLED by ²", "CANCELLED by 99999999999", "0:²", "0:300"])
)


@given(st.dictionaries(st.sampled_from(records.SQUEUE_FIELDS), ODD))
def test_no_column_breaks_the_readers(changes):
    read(line(**changes))
    read("|".join(["7", *(changes.get(name, "") for name in records.SQUEUE_FIELDS[:12])]))  # as many as accounting's
    read("|".join(["7", *(changes.get(name, "") for name in records.SQUEUE_FIELDS[:7])]))
