"""Airflow's side of the shared directory: what it lays out, and what it does not believe."""

from __future__ import annotations

import grp
import json
import os
import pathlib
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_profsched.cluster import mailbox, workdir
from airflow_profsched.cluster.exchange import Look, ReadFile
from airflow_profsched.core.errors import PolicyError, WorkDirError
from airflow_profsched.core.evidence import findings_from_json
from airflow_profsched.core.jobs import JobKey, TaskKey

TASK = TaskKey("dag", "run", "task")


@pytest.fixture
def paths(tmp_path):
    return workdir.AttemptPaths(str(tmp_path), JobKey(TASK, 1))


def lay_out(paths, env=None, **more):
    spec = {"argv": ["true"], "checkpoint_dir": f"{paths.task_dir}/checkpoints"} | more
    workdir.prepare_attempt(paths, spec, env or {}, "#!/bin/bash\n")


@pytest.mark.parametrize(
    ("path", "words"), [("", "has no work_dir"), ("/no/such/place", "is not there"), ("/etc/passwd", "is not there")]
)
def test_a_work_dir_that_cannot_be_used_is_said_in_words(path, words):
    with pytest.raises(WorkDirError, match=words):
        workdir.check_work_dir(path, "dgx")


def test_everything_is_laid_out_for_its_owner_alone(paths):
    lay_out(paths, {"TOKEN": "secret"})
    attempt = pathlib.Path(paths.attempt_dir)
    assert {path.name for path in attempt.iterdir()} == {"spec.json", "env.sh", "jobside.pyz", "step.sh", "script.sh"}
    for path in (attempt, attempt.parent, *attempt.iterdir()):
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077, path
    assert json.loads((attempt.parent / "owner").read_text()) == {"version": 1, "task": TASK.name, "attempt": 1}


def test_a_group_may_be_let_in_but_never_to_the_variables(paths):
    spec = {"argv": ["true"], "checkpoint_dir": f"{paths.task_dir}/checkpoints"}
    gid = grp.getgrall()[-1].gr_gid if os.geteuid() == 0 else os.getegid()
    sharing = workdir.Sharing(grp.getgrgid(gid).gr_name, 0o027)
    workdir.prepare_attempt(paths, spec, {"TOKEN": "secret"}, "#!/bin/bash\n", sharing)
    attempt = pathlib.Path(paths.attempt_dir)
    assert stat.S_IMODE(attempt.stat().st_mode) == 0o750
    assert attempt.stat().st_gid == gid
    assert stat.S_IMODE((attempt / "env.sh").stat().st_mode) == 0o600


def test_an_unknown_group_is_an_error_in_words(paths):
    spec = {"argv": ["true"], "checkpoint_dir": ""}
    with pytest.raises(WorkDirError, match="nosuchgroup"):
        workdir.prepare_attempt(paths, spec, {}, "#!", workdir.Sharing("nosuchgroup"))


def test_secrets_lie_in_no_other_file(paths):
    lay_out(paths, {"TOKEN": "s3cr3t-value"})
    holding = [path.name for path in pathlib.Path(paths.attempt_dir).iterdir() if b"s3cr3t-value" in path.read_bytes()]
    assert holding == ["env.sh"]


def test_an_attempt_is_taken_once(paths):
    lay_out(paths)
    with pytest.raises(workdir.AttemptExistsError):
        lay_out(paths)
    assert workdir.highest_attempt(paths.work_dir, TASK) == 1


def test_a_number_that_was_never_used_is_given_back(paths):
    lay_out(paths)
    workdir.remove_attempt(paths)
    lay_out(paths)


def test_another_tasks_directory_is_left_untouched(paths):
    pathlib.Path(paths.task_dir).mkdir(parents=True)
    (pathlib.Path(paths.task_dir) / "owner").write_text(json.dumps({"version": 1, "task": "another", "attempt": 7}))
    with pytest.raises(WorkDirError, match="belongs to another"):
        lay_out(paths)


def test_a_directory_that_cannot_be_written_is_an_error_in_words(paths):
    pathlib.Path(paths.work_dir, "dag").write_text("a file where a directory should be")
    with pytest.raises(WorkDirError, match="laying out"):
        lay_out(paths)


@pytest.mark.parametrize("env", [{"1A": "x"}, {"A-B": "x"}, {"": "x"}, {"A=B": "x"}, {"A\nB": "x"}, {"A": "x\0y"}])
def test_what_can_be_no_variable_is_refused_before_anything_is_written(paths, env):
    with pytest.raises(PolicyError):
        lay_out(paths, env)
    assert not pathlib.Path(paths.task_dir).exists()


def test_checkpoints_are_set_aside_never_deleted(paths):
    lay_out(paths)
    old = pathlib.Path(paths.task_dir, "checkpoints", "step-1")
    old.mkdir()
    moved = pathlib.Path(workdir.set_checkpoints_aside(paths.work_dir, TASK))
    assert (moved / "step-1").is_dir()
    assert workdir.set_checkpoints_aside(paths.work_dir, TASK) == ""


# ------------------------------------------------------------------------------------------------ reading


def read(paths, path, most=100):
    return workdir.read_tail(ReadFile(paths.work_dir, str(path), most))


def test_the_end_of_a_log_is_read_and_what_is_left_out_is_said(paths):
    lay_out(paths)
    log = pathlib.Path(paths.log)
    log.write_bytes(b"x" * 200 + b"\xffend")
    reply = read(paths, log)
    assert reply.out.startswith("[… the first 104 bytes are left out …]")
    assert reply.out.endswith("\ufffdend")


def strange_log(kind, log):
    if kind == "link":
        log.symlink_to("/etc/passwd")
    elif kind == "FIFO":
        os.mkfifo(log)
    elif kind == "directory":
        log.mkdir()
    elif kind == "another user's":
        log.write_text("theirs")
        os.chown(log, 65534, 65534)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("link", "symbolic link"),
        ("FIFO", "no regular file"),
        ("directory", "no regular file"),
        ("another user's", "belongs to uid 65534"),
    ],
)
def test_only_regular_files_of_our_own_are_read(paths, kind, words):
    if kind == "another user's" and os.geteuid() != 0:
        pytest.skip("only root can give a file away")
    lay_out(paths)
    strange_log(kind, pathlib.Path(paths.log))
    reply = read(paths, paths.log)
    assert reply.code
    assert words in reply.err
    assert reply.out == ""


def test_no_directory_on_the_way_may_be_a_link(paths, tmp_path):
    lay_out(paths)
    outside = tmp_path / "elsewhere"
    outside.mkdir()
    (outside / "job.log").write_text("not ours")
    (pathlib.Path(paths.task_dir) / "attempt-2").symlink_to(outside)
    assert read(paths, f"{paths.task_dir}/attempt-2/job.log").code
    assert read(paths, "/etc/passwd").code
    assert read(paths, f"{paths.work_dir}/../../etc/passwd").code


def findings(paths):
    request = Look(paths.work_dir, paths.attempt_dir, f"{paths.task_dir}/checkpoints")
    return findings_from_json(workdir.look(request).out)


MARKER = {
    "rank": 0,
    "ranks": 1,
    "nonce": "n",
    "job_id": "7",
    "restart": 0,
    "exit_code": 0,
    "ended_s": 1.0,
    "done": True,
}


def test_a_look_finds_markers_and_the_newest_checkpoint(paths):
    lay_out(paths)
    (pathlib.Path(paths.attempt_dir) / "rank-0.end").write_text(json.dumps(MARKER))
    place = pathlib.Path(paths.task_dir, "checkpoints", "step-4")
    place.mkdir()
    (place / "COMPLETE").touch()
    found = findings(paths)
    assert [marker.done for marker in found.markers] == [True]
    assert (found.checkpoint.visible, found.checkpoint.step) == (True, 4)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "[" * 60000,
        "null",
        json.dumps(MARKER | {"rank": "0"}),
        json.dumps(MARKER | {"ended_s": 1e400}),
        "x" * 70000,
    ],
)
def test_a_marker_that_is_not_whole_is_told_and_not_believed(paths, content):
    lay_out(paths)
    (pathlib.Path(paths.attempt_dir) / "rank-0.end").write_text(content)
    found = findings(paths)
    assert found.markers == ()
    assert found.strange


@given(st.binary(max_size=300))
def test_no_marker_breaks_the_look(content):
    import tempfile

    with tempfile.TemporaryDirectory() as directory:
        own = workdir.AttemptPaths(directory, JobKey(TASK, 1))
        lay_out(own)
        (pathlib.Path(own.attempt_dir) / "rank-0.end").write_bytes(content)
        assert not any(marker.done for marker in findings(own).markers)


def test_directories_that_are_not_there_are_strange_and_not_an_error(paths):
    assert findings(paths).strange
    assert not findings(paths).checkpoint.visible


# ------------------------------------------------------------------------------------------------ mailbox


def test_notes_are_listed_by_job_and_strange_files_passed_over(paths):
    lay_out(paths)
    box = pathlib.Path(paths.mailbox_dir)
    for name in ("a-1.start", "a-1.end", "b-2.notice", "x", "..end", "a-1.strange", "A-1.end"):
        (box / name).touch()
    assert mailbox.list_mailbox(paths.work_dir) == {"a-1": {"start", "end"}, "b-2": {"notice"}}
    mailbox.clear_notes(paths.work_dir, {"a-1": {"start", "end"}})
    assert mailbox.list_mailbox(paths.work_dir) == {"b-2": {"notice"}}


def test_no_mailbox_is_an_empty_one(tmp_path):
    assert mailbox.list_mailbox(str(tmp_path)) == {}


def test_who_is_waited_for(tmp_path):
    mailbox.write_watch_file(str(tmp_path), ["a", "b"])
    now = (tmp_path / "mailbox" / "watch").stat().st_mtime
    assert mailbox.watched_names(str(tmp_path), now, 60) == {"a", "b"}
    assert mailbox.watched_names(str(tmp_path), now + 120, 60) == set()


def test_what_was_kept_is_believed_for_a_while(tmp_path):
    mailbox.keep(str(tmp_path), "site-x.json", "{}")
    now = (tmp_path / "mailbox" / "site-x.json").stat().st_mtime
    assert mailbox.read_kept(str(tmp_path), "site-x.json", 60, now) == "{}"
    assert mailbox.read_kept(str(tmp_path), "site-x.json", 60, now + 61) is None
    assert mailbox.read_kept(str(tmp_path), "nothing", 60, now) is None
