"""The verbs of the Slurm room, driven by replies: a fake of the transport alone."""

from __future__ import annotations

import pytest

from airflow_profsched.cluster.exchange import Reply, run
from airflow_profsched.core.errors import ClusterUnavailableError, LostReplyError, SubmitError, SubmitLimitError
from airflow_profsched.core.jobs import EndCause, JobRef, JobState
from airflow_profsched.slurm import cli, records
from airflow_profsched.slurm.site import Site, read_site


class Script:
    """A sender that answers by the command's first word, in turn, and remembers what it was asked."""

    def __init__(self, **answers):
        self.answers = {name: list(given) if isinstance(given, list) else [given] for name, given in answers.items()}
        self.asked = []

    def __call__(self, request):
        self.asked.append(request.argv)
        answer = self.answers[request.argv[0]].pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer if isinstance(answer, Reply) else Reply(0, answer)


def found(job_id, nonce, state="RUNNING", name="task"):
    values = {
        "JobID": job_id,
        "UserName": "u",
        "State": state,
        "RestartCnt": "0",
        "SubmitTime": "1000",
        "Reason": "None",
    }
    values |= {"Name": name, "Comment": records.comment(1, nonce, 1, "training")}
    return "".join(f"{values[field]}|" for field in records.FIND_FIELDS) + "\n"


def shown(job_id, state="RUNNING", name="task", user="u", submit="1000", **changes):
    values = dict.fromkeys(records.SQUEUE_FIELDS, "N/A")
    values |= {"JobID": job_id, "UserName": user, "State": state, "RestartCnt": "0", "SubmitTime": submit, "Name": name}
    values |= {"exit_code": "0", "Reason": "None", "Comment": ""} | changes
    return "".join(f"{values[field]}|" for field in records.SQUEUE_FIELDS) + "\n"


def accounted(job_id, state, name="task", user="u", submit="1000"):
    values = dict.fromkeys(records.SACCT_FIELDS, "")
    values |= {"JobIDRaw": job_id, "User": user, "State": state, "ExitCode": "0:0", "Submit": submit, "JobName": name}
    return "|".join(values[field] for field in records.SACCT_FIELDS) + "\n"


def ref(job_id, submitted_s=1000.0, user=""):
    return JobRef(job_id, "task", submitted_s, user)


def ask(send, refs, details=(), release=(22, 5, 8), accounting=True):
    return run(cli.query(refs, details, release=release, accounting=accounting), send)


# ------------------------------------------------------------------------------------------------ submit


@pytest.mark.parametrize("out", ["12\n", "12;west\n", "Welcome!\nPlease read the news\n12\n", "12\n\n"])
def test_the_last_line_of_the_answer_is_the_job(out):
    assert run(cli.submit("#!", "task", "n"), Script(sbatch=out)) == "12"


@pytest.mark.parametrize(
    "lost",
    [
        LostReplyError("no answer within 60 s"),
        Reply(1, "", "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation"),
        Reply(1, "", "sbatch: error: Batch job submission failed: Zero Bytes were transmitted or received"),
        Reply(
            1, "", "sbatch: error: Batch job submission failed: Unable to contact slurm controller (receive failure)"
        ),
        Reply(0, "see you later\n"),
        Reply(-9, "", ""),
    ],
)
def test_a_lost_answer_is_looked_up_and_adopted_never_sent_again(lost):
    send = Script(sbatch=lost, squeue=found("11", "other") + found("12", "n"))
    assert run(cli.submit("#!", "task", "n"), send) == "12"
    assert [argv[0] for argv in send.asked] == ["sbatch", "squeue"]


def test_a_lost_answer_without_such_a_job_stays_lost():
    send = Script(sbatch=LostReplyError("?"), squeue=found("11", "other"))
    with pytest.raises(LostReplyError):
        run(cli.submit("#!", "task", "n"), send)


VIOLATES = (
    "sbatch: error: Batch job submission failed: Job violates accounting/QOS policy "
    "(job submit limit, user's size and/or time limits)"
)


@pytest.mark.parametrize(
    "silence", [ClusterUnavailableError("no answer within 60 s"), Reply(1, "", "Socket timed out")]
)
def test_a_lost_answer_that_cannot_be_looked_up_stays_lost(silence):
    """Else the caller would take it for a submission that never went out, and send another: two jobs."""
    send = Script(sbatch=Reply(1, "", "sbatch: error: Socket timed out on send/recv operation"), squeue=silence)
    with pytest.raises(LostReplyError, match=r"sbatch ended with 1 .*; "):
        run(cli.submit("#!", "task", "n"), send)


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("sbatch: error: Batch job submission failed: Invalid qos specification", SubmitError),
        (
            "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates …",
            SubmitLimitError,
        ),
        ("sbatch: error: AssocMaxSubmitJobLimit", SubmitLimitError),
        (f"sbatch: error: QOSMaxSubmitJobPerUserLimit\n{VIOLATES}", SubmitLimitError),
        (VIOLATES, SubmitLimitError),
        (f"sbatch: error: QOSMaxWallDurationPerJobLimit\n{VIOLATES}", SubmitError),
        (f"sbatch: error: QOSMinGRES\n{VIOLATES}", SubmitError),
        (
            "sbatch: error: Batch job submission failed: Unable to contact slurm controller (connect failure)",
            ClusterUnavailableError,
        ),
    ],
)
def test_refusals(said, error):
    with pytest.raises(error) as caught:
        run(cli.submit("#!", "task", "n"), Script(sbatch=Reply(1, "", said)))
    assert type(caught.value) is error


# ------------------------------------------------------------------------------------------------ query


def test_one_question_answers_for_all_on_a_release_without_the_cheap_form():
    send = Script(squeue=shown("1") + shown("2", "PENDING", Reason="Priority"))
    answers = ask(send, [ref("1"), ref("2")])
    assert {job_id: seen.state for job_id, seen in answers.items()} == {"1": JobState.RUNNING, "2": JobState.QUEUED}
    assert len(send.asked) == 1


def test_details_are_asked_only_of_what_is_not_plainly_running_where_there_is_a_cheap_form():
    send = Script(squeue=["1|RUNNING\n2|PENDING\n", shown("2", "PENDING", Reason="Priority")])
    answers = ask(send, [ref("1"), ref("2")], release=(24, 11, 5))
    assert "--only-job-state" in send.asked[0]
    assert "--jobs=2" in send.asked[1]
    assert (answers["1"].detailed, answers["2"].reason) == (False, "Priority")


def test_a_purged_job_is_asked_of_accounting_and_the_others_are_answered():
    """squeue exits 1 "Invalid job id specified" only where it knows none of them."""
    send = Script(squeue=shown("1"), sacct=accounted("3", "COMPLETED"))
    answers = ask(send, [ref("1"), ref("3")])
    assert (answers["1"].state, answers["3"].cause) == (JobState.RUNNING, EndCause.COMPLETED)
    send = Script(
        squeue=Reply(1, "", "slurm_load_jobs error: Invalid job id specified"), sacct=accounted("3", "FAILED")
    )
    assert ask(send, [ref("3")])["3"].cause is EndCause.NONZERO_EXIT


def test_what_nobody_knows_is_absent():
    send = Script(squeue=Reply(1, "", "slurm_load_jobs error: Invalid job id specified"), sacct="")
    assert ask(send, [ref("3")]) == {}


def test_no_accounting_is_not_asked():
    send = Script(squeue=Reply(1, "", "slurm_load_jobs error: Invalid job id specified"))
    assert ask(send, [ref("3")], accounting=False) == {}


@pytest.mark.parametrize(
    "said",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
        "squeue: error: slurm_load_job_state: Unable to query jobs state: Unspecified error",
        'squeue: error: Munge encode failed: Failed to connect to "/run/munge/socket": Connection refused',
        "squeue: error: fetch_config: DNS SRV lookup failed\nsqueue: fatal: Could not establish a configuration source",
    ],
)
def test_a_silent_controller_is_never_a_missing_job(said):
    with pytest.raises(ClusterUnavailableError):
        ask(Script(squeue=Reply(1, "", said)), [ref("1")])


def test_silent_accounting_is_never_a_missing_job():
    silent = Reply(1, "", "sacct: error: slurm_persist_conn_open: Something happened with the receiving/processing …")
    send = Script(squeue=Reply(1, "", "slurm_load_jobs error: Invalid job id specified"), sacct=silent)
    with pytest.raises(ClusterUnavailableError):
        ask(send, [ref("1")])


@pytest.mark.parametrize("foreign", [shown("1", name="another"), shown("1", user="mallory"), shown("1", submit="500")])
def test_ids_are_reused_so_name_user_and_time_must_agree(foreign):
    assert ask(Script(squeue=foreign, sacct=""), [ref("1", user="u")]) == {}


def test_accounting_says_who_cancelled_and_until_then_the_end_is_not_complete():
    cancelled = shown("1", "CANCELLED")
    assert not ask(Script(squeue=cancelled, sacct=accounted("1", "RUNNING")), [ref("1")])["1"].complete
    answers = ask(Script(squeue=cancelled, sacct=accounted("1", "CANCELLED by 0")), [ref("1")])
    assert (answers["1"].complete, answers["1"].cancelled_by) == (True, "root (uid 0)")


def test_silent_accounting_keeps_nobody_from_the_controllers_answers():
    """One job that has left the controller, while slurmdbd is away: the preempted one beside it is still seen."""
    silent = Reply(
        1, "", "sacct: error: Problem talking to the database: Connection refused\nslurmdbd: connection lost"
    )
    send = Script(squeue=shown("1", "PREEMPTED") + shown("2", "CANCELLED"), sacct=silent)
    answers = ask(send, [ref("1"), ref("2"), ref("3")])
    assert answers["1"].cause is EndCause.PREEMPTED
    assert (answers["2"].cause, answers["2"].complete) == (EndCause.CANCELLED, False)
    assert (answers["3"].state, answers["3"].detailed) == (JobState.UNDETERMINED, False), "neither ended nor missing"
    assert "Connection refused" in answers["3"].raw


@pytest.mark.parametrize("word", ["RUNNING", "PENDING", "SUSPENDED", "REQUEUED"])
def test_a_job_that_only_accounting_believes_alive_is_not_known(word):
    """A runaway job stays RUNNING there for ever; its end marker or a deadline decides."""
    send = Script(squeue=Reply(1, "", "slurm_load_jobs error: Invalid job id specified"), sacct=accounted("3", word))
    assert ask(send, [ref("3")]) == {}


def test_a_state_of_accounting_that_nobody_knows_is_kept_raw():
    send = Script(
        squeue=Reply(1, "", "slurm_load_jobs error: Invalid job id specified"), sacct=accounted("3", "WEDGED")
    )
    answer = ask(send, [ref("3")])["3"]
    assert (answer.state, answer.raw) == (JobState.UNDETERMINED, "WEDGED")


def test_what_the_cheap_form_called_ended_is_settled_by_details_or_accounting_alone():
    gone = Reply(1, "", "slurm_load_jobs error: Invalid job id specified")
    send = Script(squeue=["1|COMPLETED\n", gone], sacct=accounted("1", "PREEMPTED"))
    assert ask(send, [ref("1")], release=(24, 11, 5))["1"].cause is EndCause.PREEMPTED
    send = Script(squeue=["1|COMPLETED\n", gone], sacct="")
    assert ask(send, [ref("1")], release=(24, 11, 5)) == {}


def test_thousands_of_jobs_are_asked_in_few_commands():
    send = Script(squeue=["", "", ""], sacct=["", "", ""])
    ask(send, [ref(str(number)) for number in range(1, 2501)])
    assert [argv[0] for argv in send.asked] == ["squeue"] * 3 + ["sacct"] * 3


# ------------------------------------------------------------------------------------------------ acts


def test_a_job_is_marked_before_it_is_cancelled():
    send = Script(squeue=records.comment(1, "n", 1, "p") + "|\n", scontrol="", scancel="")
    run(cli.cancel("7"), send)
    assert send.asked[1] == ("scontrol", "update", "jobid=7", f"comment={records.comment(1, 'n', 1, 'p')}:cancelled")
    assert send.asked[2] == ("scancel", "7")


@pytest.mark.parametrize(
    "answers",
    [
        {"squeue": ClusterUnavailableError("no answer within 60 s")},
        {"squeue": records.comment(1, "n", 1, "p") + "|\n", "scontrol": ClusterUnavailableError("no answer")},
        {"squeue": records.comment(1, "n", 1, "p") + "|\n", "scontrol": Reply(1, "", "Access/permission denied")},
    ],
)
def test_a_mark_that_cannot_be_written_keeps_no_job_alive(answers):
    send = Script(**answers, scancel="")
    run(cli.cancel("7"), send)
    assert send.asked[-1] == ("scancel", "7")


def test_cancelling_what_has_ended_is_no_error_but_silence_is():
    gone = Reply(1, "", "scancel: error: Kill job error on job id 7: Invalid job id specified")
    run(cli.cancel("7"), Script(squeue=Reply(1, "", "Invalid job id specified"), scancel=gone))
    silent = Reply(1, "", "scancel: error: Kill job error on job id 7: Unable to contact slurm controller")
    with pytest.raises(ClusterUnavailableError):
        run(cli.cancel("7"), Script(squeue=Reply(1, "", "x"), scancel=silent))


def test_a_nudge_starts_a_job_a_moment_after_its_restart_and_asking_again_never_puts_it_off():
    """In the second of the restart it would end by "Job credential revoked"; `now+3` every 2 s would never come."""
    send = Script(squeue="1796124645|\n", scontrol="")
    run(cli.nudge("7"), send)
    assert send.asked[1] == ("scontrol", "update", "jobid=7", "StartTime=2026-12-01T11:30:48")


@pytest.mark.parametrize(
    "shown", ["", "N/A|\n", "9" * 17 + "|\n", Reply(1, "", "slurm_load_jobs error: Invalid job id specified")]
)
def test_nobody_is_nudged_whose_restart_is_not_known(shown):
    send = Script(squeue=shown)
    run(cli.nudge("7"), send)
    assert len(send.asked) == 1


def test_find_passes_over_jobs_of_another_name_and_says_which_were_cancelled():
    marked = found("3", "n").replace("training|", "training:cancelled|")
    send = Script(squeue=found("1", "n", name="taskx") + marked + found("4", "m"))
    jobs = run(cli.find("task"), send)
    assert [(job.job_id, job.nonce, job.attempt, job.cancelled) for job in jobs] == [
        ("4", "m", 1, False),
        ("3", "n", 1, True),
    ]


def test_an_error_says_what_was_asked_and_what_came_back():
    with pytest.raises(Exception, match=r"scontrol show config … ended with 1: slurm\.conf: broken"):
        run(read_site(), Script(scontrol=Reply(1, "", "slurm.conf: broken")))


CONFIG = """Configuration data as of 2026-12-01T10:00:00
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = west
KillWait                = 30 sec
MinJobAge               = 300 sec
PreemptMode             = REQUEUE
PreemptType             = preempt/qos
SLURM_VERSION           = 24.11.5
"""
PARTITION = (
    "PartitionName=train AllowQos=ALL Default=YES MaxTime=UNLIMITED Nodes=n[1-2] PriorityTier=1 GraceTime=0 "
    "PreemptMode=REQUEUE State=UP TotalCPUs=32 TotalNodes=2 TRES=cpu=32,mem=128000M,node=2,billing=32,gres/gpu=8\n"
)
QOS = "normal|0|00:00:00||||cluster\ntraining|100|00:00:10|gres/gpu=512|2-00:00:00||requeue\ninference|200|||02:00:00|training|cluster\n"


def test_a_site_is_read_and_kept_as_json():
    site = run(read_site(), Script(scontrol=[CONFIG, PARTITION], sacctmgr=QOS))
    assert (site.cluster, site.release, site.accounting, site.kill_wait_s) == ("west", (24, 11, 5), True, 30)
    assert site.qos["training"].grace_s == 10
    assert site.qos["training"].grp_tres == {"gres/gpu": 512}
    assert site.qos["inference"].preempt == ("training",)
    assert (site.partitions["train"].nodes, site.partitions["train"].gpus) == (2, 8)
    assert Site.from_json(site.to_json()) == site
