"""What real clusters of three releases said, read by the Slurm room, and what each means.

The fixtures hold what scontrol and sacct showed in each situation (tests/recordings/slurm); the tests lay those values out
as squeue and sacct print them in our formats. That layout is the transport's; the readers are ours.
"""

from __future__ import annotations

import calendar
import json
import pathlib
import time

import pytest

from airflow_profsched.core.evidence import CheckpointView, EndMarker, Findings, Submission, settle
from airflow_profsched.core.jobs import EndCause, JobState
from airflow_profsched.slurm import records

FOLDER = pathlib.Path(__file__).parent.parent / "recordings" / "slurm"
RELEASES = ("22.05.8", "24.11.5", "26.05.5")


def load(release):
    lines = (FOLDER / f"{release}.jsonl").read_text(encoding="utf-8").splitlines()
    return {row["situation"]: row for row in map(json.loads, lines)}


RECORDED = {release: load(release) for release in RELEASES}


def epoch(text):
    try:
        return str(calendar.timegm(time.strptime(text, "%Y-%m-%dT%H:%M:%S")))
    except (ValueError, TypeError):
        return "N/A"


def squeue_line(shown):
    values = {
        "JobID": shown["JobId"],
        "UserName": shown["UserId"].split("(")[0],
        "State": shown["JobState"],
        "RestartCnt": shown["Restarts"],
        "PreemptTime": epoch(shown.get("PreemptTime")),
        "SubmitTime": epoch(shown["SubmitTime"]),
        "StartTime": epoch(shown["StartTime"]),
        "EndTime": epoch(shown["EndTime"]),
        "TimeLimit": shown["TimeLimit"],
        "QOS": shown.get("QOS", "(null)"),
        "Partition": shown["Partition"],
        "NodeList": shown["NodeList"],
        "exit_code": shown["ExitCode"],
        "Reason": shown["Reason"],
        "Name": shown["JobName"],
        "Comment": "",
    }
    return "".join(f"{values[name]}|" for name in records.SQUEUE_FIELDS)


def sacct_lines(rows):
    names = dict(zip(records.SACCT_FIELDS, records.SACCT_FIELDS, strict=True)) | {"JobIDRaw": "JobID"}
    lines = []
    for row in rows:
        values = {name: row.get(names[name], "") for name in records.SACCT_FIELDS}
        values |= {name: epoch(row[name]) for name in ("Submit", "Start", "End")}
        lines.append("|".join(values[name] for name in records.SACCT_FIELDS))
    return "\n".join(lines)


def seen(release, situation):
    (record,) = records.squeue_records(squeue_line(RECORDED[release][situation]["scontrol"]))
    return record.snapshot


OLD, NEW = "22.05.8", ("24.11.5", "26.05.5")

GRACEFUL = [
    f"B_t10{mode}_{where}_{code}.after"
    for mode in ("r", "c")
    for where in ("bexec", "bsrun")
    for code in (0, 1, 85, 143)
]


@pytest.mark.parametrize("situation", [*GRACEFUL, "B_t10r_norequeue.after", "I_both0.after", "I_onenode_preempt.after"])
def test_on_22_05_an_exit_by_itself_in_the_grace_time_reads_as_preempted(situation):
    """There Slurm calls it COMPLETED or FAILED; only PreemptTime tells."""
    shown = seen(OLD, situation)
    assert shown.raw in ("COMPLETED", "FAILED")
    assert (shown.state.ended, shown.cause) == (True, EndCause.PREEMPTED)


@pytest.mark.parametrize("release", NEW)
@pytest.mark.parametrize("situation", [name for name in GRACEFUL if "t10c" in name] + ["B_t10r_norequeue.after"])
def test_later_releases_say_preempted_themselves(release, situation):
    assert seen(release, situation).cause is EndCause.PREEMPTED


@pytest.mark.parametrize("release", NEW)
@pytest.mark.parametrize("situation", [name for name in GRACEFUL if "t10r" in name])
def test_later_releases_requeue_what_may_be_requeued(release, situation):
    shown = seen(release, situation)
    assert (shown.state, shown.reason, shown.restarts, shown.cause) == (JobState.REQUEUED, "BeginTime", 1, None)


ENDS = {
    "A_t10c_bsrun.after": EndCause.PREEMPTED,
    "B_t0c_bexec_0.after": EndCause.PREEMPTED,
    "B_t0c_bsrun_85.after": EndCause.PREEMPTED,
    "B_t10r_norequeue_kill.after": EndCause.PREEMPTED,
    "C_exit0.final": EndCause.COMPLETED,
    "C_exit85.final": EndCause.NONZERO_EXIT,
    "C_preempt.final": EndCause.COMPLETED,
    "C_preempt_cancel.final": EndCause.PREEMPTED,
    "C_requeue_root.final": EndCause.COMPLETED,
    "C_scancel_root.final": EndCause.CANCELLED,
    "C_scancel_stepkill.final": EndCause.CANCELLED,
    "C_scancel_user.final": EndCause.CANCELLED,
    "F_TERM30_bexec_ign.final": EndCause.TIMEOUT,
    "F_TERM30_bsrun_0.final": EndCause.COMPLETED,
    "F_TERM30_bsrun_143.final": EndCause.NONZERO_EXIT,
    "F_TERM30_bsrun_ign.final": EndCause.TIMEOUT,
    "F_none_bexec_85.final": EndCause.TIMEOUT,
    "I2_killrank1.final": EndCause.NONZERO_EXIT,
    "J_down_norequeue.final": EndCause.NODE_FAIL,
    "J_killslurmd_norequeue.final": EndCause.NODE_FAIL,
    "J_down.final": EndCause.COMPLETED,
    "PRIO_low10c_bexec.final": EndCause.PREEMPTED,
    "PRIO_low10c_bsrun_0.final": EndCause.PREEMPTED,
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("situation", ENDS)
def test_ends_read_alike_on_every_release(release, situation):
    shown = seen(release, situation)
    assert (shown.state.ended, shown.cause) == (True, ENDS[situation])
    assert shown.end_s is not None


ALIVE = {
    "A_t0r_bsrun.after": (JobState.REQUEUED, "BeginTime"),
    "C_requeue_user.after": (JobState.REQUEUED, "BeginTime"),
    "C_scancel_other.after": (JobState.RUNNING, ""),
    "D3_adminhold.held": (JobState.REQUEUED_HELD, "JobHeldAdmin"),
    "D3_userhold.held": (JobState.REQUEUED_HELD, "JobHeldUser"),
    "D3_requeuehold_root.held": (JobState.REQUEUED_HELD, "job_requeued_in_held_state"),
    "C_requeuehold_user.after": (JobState.REQUEUED_HELD, "job_requeued_in_held_state"),
    "J_down.after": (JobState.REQUEUED, "BeginTime"),
    "J_killstepd.after": (JobState.RUNNING, ""),
    "R_completing.live": (JobState.RUNNING, ""),
    "R_grace_running.live": (JobState.RUNNING, ""),
    "R_running.live": (JobState.RUNNING, ""),
    "SUSP2_bsrun.after": (JobState.SUSPENDED, ""),
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("situation", ALIVE)
def test_what_lives_is_no_end(release, situation):
    shown = seen(release, situation)
    assert (shown.state, shown.reason, shown.cause, shown.end_s) == (*ALIVE[situation], None, None)


@pytest.mark.parametrize("release", NEW)
def test_the_fifth_requeue_is_held(release):
    assert seen(release, "R_requeue_hold.live").state is JobState.REQUEUED_HELD


@pytest.mark.parametrize("release", RELEASES)
def test_a_job_in_its_grace_time_shows_when_it_was_preempted(release):
    assert seen(release, "R_grace_running.live").preempt_s is not None or release != OLD


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize(
    ("situation", "by"), [("C_scancel_root.final", "root (uid 0)"), ("C_scancel_user.final", "uid 2001")]
)
def test_accounting_says_who_cancelled(release, situation, by):
    (record,) = records.sacct_records(sacct_lines(RECORDED[release][situation]["sacct"])).values()
    assert record.snapshot.cause is EndCause.CANCELLED
    assert by in record.snapshot.cancelled_by


@pytest.mark.parametrize("release", RELEASES)
def test_accounting_counts_the_runs_of_a_job(release):
    rows = RECORDED[release]["D6_requeue.final"]["sacct"]
    (record,) = records.sacct_records(sacct_lines(rows)).values()
    assert (record.snapshot.cause, record.snapshot.restarts) == (EndCause.COMPLETED, len(rows) - 1)


def marker(**changes):
    fields = {"rank": 0, "ranks": 1, "nonce": "n", "job_id": "7", "restart": 0, "exit_code": 85, "ended_s": 10.0}
    return EndMarker(**{**fields, **changes})


@pytest.mark.parametrize("situation", [name for name in GRACEFUL if name.endswith(("_0.after", "_85.after"))])
def test_on_22_05_a_saved_training_is_no_success_even_where_preempt_time_is_forgotten(situation):
    """The end marker alone tells then: a notice came, and the program did not declare itself done."""
    shown = seen(OLD, situation)
    forgotten = shown.__class__(
        **{name: getattr(shown, name) for name in shown.__slots__ if name not in ("preempt_s", "cause", "job_id")},
        job_id="7",
        cause=EndCause.COMPLETED if shown.raw == "COMPLETED" else EndCause.NONZERO_EXIT,
    )
    found = Findings((marker(notice_s=8.0),), checkpoint=CheckpointView(visible=True, step=5))
    assert settle(forgotten, found, Submission("7", "n", 1)).cause is EndCause.PREEMPTED


@pytest.mark.parametrize("release", RELEASES)
def test_no_recorded_situation_is_called_a_success_by_its_state_alone(release):
    own = Submission("7", "n", 1)
    for situation in RECORDED[release]:
        verdict = settle(seen(release, situation), Findings(), own) if seen(release, situation).state.ended else None
        assert verdict is None or verdict.cause is not EndCause.COMPLETED, situation
