"""The shared directory holds what programs, administrators and full disks leave there."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess

import pytest

from airflow_profsched.cluster import mailbox, workdir
from airflow_profsched.cluster.exchange import Look, ReadFile
from airflow_profsched.core.errors import PolicyError, WorkDirError
from airflow_profsched.core.evidence import findings_from_json
from airflow_profsched.core.jobs import JobKey, TaskKey

TASK = TaskKey("dag", "run", "task")
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


@pytest.fixture
def paths(tmp_path):
    return workdir.AttemptPaths(str(tmp_path), JobKey(TASK, 1))


def lay_out(paths, env=None, **more):
    spec = {"argv": ["true"], "checkpoint_dir": f"{paths.task_dir}/checkpoints"} | more
    workdir.prepare_attempt(paths, spec, env or {}, "#!/bin/bash\n")


def found(paths):
    request = Look(paths.work_dir, paths.attempt_dir, f"{paths.task_dir}/checkpoints")
    return findings_from_json(workdir.look(request).out)


def test_a_relative_work_dir_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(WorkDirError, match="not absolute"):
        workdir.check_work_dir(".", "dgx")


@pytest.mark.parametrize("owner", ["", "{", "[]", "[" * 60_000, '{"task": "x"}', '{"task": "x", "attempt": "1"}'])
def test_an_owner_file_that_is_none_is_said_in_words(paths, owner):
    pathlib.Path(paths.task_dir).mkdir(parents=True)
    place = pathlib.Path(paths.task_dir, "owner")
    place.write_text(owner)
    with pytest.raises(WorkDirError, match="no owner file of ours"):
        lay_out(paths)
    assert place.read_text() == owner
    assert workdir.highest_attempt(paths.work_dir, TASK) == 0


@pytest.mark.parametrize("kind", ["FIFO", "link"])
def test_an_owner_file_that_is_no_file_is_neither_read_nor_replaced(paths, kind):
    pathlib.Path(paths.task_dir).mkdir(parents=True)
    place = pathlib.Path(paths.task_dir, "owner")
    os.mkfifo(place) if kind == "FIFO" else place.symlink_to("/etc/passwd")
    with pytest.raises(WorkDirError, match="laying out"):
        lay_out(paths)


def test_a_number_that_was_claimed_is_not_tried_again_although_its_directory_was_never_made(paths):
    """A worker that dies between the two."""
    pathlib.Path(paths.task_dir).mkdir(parents=True)
    pathlib.Path(paths.task_dir, "owner").write_text(json.dumps({"version": 1, "task": TASK.name, "attempt": 3}))
    assert workdir.highest_attempt(paths.work_dir, TASK) == 3
    pathlib.Path(paths.task_dir, "attempt-5").mkdir()
    assert workdir.highest_attempt(paths.work_dir, TASK) == 5


def test_a_full_disk_is_said_and_half_an_attempt_cleared_away(tmp_path):
    """A real file system that is full: a small tmpfs of this user's own."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "none", disk], capture_output=True, check=False
    ).returncode:
        pytest.skip("only root can mount a file system")
    try:
        own = workdir.AttemptPaths(str(disk), JobKey(TASK, 1))
        with pytest.raises(WorkDirError, match="free space or raise the quota"):
            lay_out(own, {"LARGE": "x" * 100_000})
        assert not pathlib.Path(own.attempt_dir).exists()
        own = workdir.AttemptPaths(str(disk), JobKey(TASK, workdir.highest_attempt(str(disk), TASK) + 1))
        lay_out(own)
    finally:
        subprocess.run(["umount", "-l", disk], check=True)


@pytest.mark.parametrize("argv", [["a\0b"], ["\ud800"]])
def test_an_argument_that_no_process_can_have_is_refused_before_anything_is_written(paths, argv):
    with pytest.raises(PolicyError, match="an argument of the command"):
        lay_out(paths, argv=argv)
    assert not pathlib.Path(paths.task_dir).exists()


def test_a_variable_that_cannot_be_encoded_is_refused(paths):
    with pytest.raises(PolicyError, match="the value of A"):
        lay_out(paths, {"A": "\ud800"})


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_the_bare_command_gets_every_byte_in_every_shell(tmp_path, shell):
    odd = "a 'q' \"d\" $HOME `id` \\ \nnew \udcff ü -n"
    paths = workdir.AttemptPaths(str(tmp_path / "a 'work' $dir"), JobKey(TASK, 1))
    show = 'printf "%s\\0%s\\0%s" "$ODD" "$place" "$1" > shown'
    lay_out(paths, {"ODD": odd, "place": "mine"}, argv=["/bin/sh", "-c", show, "sh", odd])
    bare = tmp_path / "bin"
    bare.mkdir()
    done = subprocess.run([shell, f"{paths.attempt_dir}/step.sh"], env={"PATH": str(bare)}, check=False)
    assert done.returncode == 0
    shown = pathlib.Path(paths.task_dir, "shown").read_bytes()
    assert shown == b"\0".join([os.fsencode(odd), b"mine", os.fsencode(odd)])


def test_a_note_for_us_that_cannot_be_written_keeps_no_command_from_running(paths, tmp_path):
    lay_out(paths, argv=["/bin/sh", "-c", ": > ran"])
    pathlib.Path(paths.attempt_dir, "plain").mkdir()
    bare = tmp_path / "bin"
    bare.mkdir()
    done = subprocess.run(["/bin/sh", f"{paths.attempt_dir}/step.sh"], env={"PATH": str(bare)}, check=False)
    assert done.returncode == 0
    assert pathlib.Path(paths.task_dir, "ran").exists()


# ------------------------------------------------------------------------------------------------ looks


@pytest.mark.parametrize("kind", ["link", "FIFO", "directory", "another user's", "dangling link"])
def test_a_marker_that_is_no_file_of_ours_is_told_and_not_believed(paths, tmp_path, kind):
    lay_out(paths)
    place = pathlib.Path(paths.attempt_dir, "rank-0.end")
    good = tmp_path / "good"
    good.write_text(json.dumps(MARKER))
    if kind == "link":
        place.symlink_to(good)
    elif kind == "dangling link":
        place.symlink_to(tmp_path / "nowhere")
    elif kind == "FIFO":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif os.geteuid():
        pytest.skip("only root can give a file away")
    else:
        place.write_text(json.dumps(MARKER))
        os.chown(place, 65534, 65534)
    seen = found(paths)
    assert seen.markers == ()
    assert len(seen.strange) == 1
    assert "rank-0.end" in seen.strange[0]


def test_one_strange_marker_hides_no_other(paths):
    lay_out(paths)
    for rank in range(3):
        body = json.dumps(MARKER | {"rank": rank, "ranks": 3})
        pathlib.Path(paths.attempt_dir, f"rank-{rank}.end").write_text(body if rank != 1 else body[:-9])
    seen = found(paths)
    assert [marker.rank for marker in seen.markers] == [0, 2]
    assert "rank-1.end" in seen.strange[0]


def test_a_look_reads_so_many_markers_and_no_more(paths, monkeypatch):
    lay_out(paths)
    for rank in range(5000):
        pathlib.Path(paths.attempt_dir, f"rank-{rank}.end").write_text(json.dumps(MARKER | {"rank": rank}))
    seen = found(paths)
    assert [marker.rank for marker in seen.markers] == list(range(4096))
    assert "5000 end markers" in seen.strange[0]


def test_large_markers_do_not_fill_the_memory(paths):
    lay_out(paths)
    body = json.dumps(MARKER | {"padding": "x" * 64_000})
    for rank in range(400):
        pathlib.Path(paths.attempt_dir, f"rank-{rank}.end").write_text(body)
    reply = workdir.look(Look(paths.work_dir, paths.attempt_dir))
    assert len(reply.out) < 20 << 20
    assert any("larger" in line for line in json.loads(reply.out)["strange"])


@pytest.mark.parametrize("number", ["1" * 5000, "1e400", "-1e400", "NaN"])
def test_numbers_that_are_none_are_no_evidence(paths, number):
    lay_out(paths)
    text = json.dumps(MARKER).replace('"ended_s": 1.0', f'"ended_s": {number}')
    pathlib.Path(paths.attempt_dir, "rank-0.end").write_text(text)
    seen = found(paths)
    assert seen.markers == ()
    assert seen.strange


def test_an_attempt_that_is_a_link_is_not_looked_into(paths, tmp_path):
    lay_out(paths)
    elsewhere = tmp_path / "elsewhere"
    pathlib.Path(paths.attempt_dir).rename(elsewhere)
    pathlib.Path(paths.attempt_dir).symlink_to(elsewhere)
    (elsewhere / "rank-0.end").write_text(json.dumps(MARKER))
    assert found(paths).markers == ()
    assert found(paths).strange


def test_a_fifo_for_a_log_is_not_waited_for(paths):
    lay_out(paths)
    os.mkfifo(paths.log)
    reply = workdir.read_tail(ReadFile(paths.work_dir, paths.log, 100))
    assert "no regular file" in reply.err


# ------------------------------------------------------------------------------------------------ mailbox


def test_a_directory_or_link_in_place_of_a_note_is_none(paths):
    lay_out(paths)
    box = pathlib.Path(paths.mailbox_dir)
    (box / "a-1.end").mkdir()
    (box / "b-1.end").symlink_to("/etc/passwd")
    (box / "c-1.end").touch()
    assert mailbox.list_mailbox(paths.work_dir) == {"c-1": {"end"}}


def test_a_note_that_cannot_be_removed_fails_nobody(paths):
    lay_out(paths)
    box = pathlib.Path(paths.mailbox_dir)
    (box / "a-1.end").mkdir()
    (box / "b-1.end").touch()
    mailbox.clear_notes(paths.work_dir, {"a-1": {"end", "start"}, "b-1": {"end"}})
    assert not (box / "b-1.end").exists()


def test_a_hundred_thousand_strange_files_are_passed_over(paths):
    lay_out(paths)
    box = pathlib.Path(paths.mailbox_dir)
    for number in range(100_000):
        os.close(os.open(box / f"strange{number}", os.O_CREAT | os.O_WRONLY))
    (box / "a-1.end").touch()
    assert mailbox.list_mailbox(paths.work_dir) == {"a-1": {"end"}}


@pytest.mark.parametrize("said", ['"abc"', "[1, [2], null]", "[" * 60_000, "7", '{"a": 1'])
def test_what_is_no_list_of_names_names_nobody(tmp_path, said):
    mailbox.write_watch_file(str(tmp_path), ["a"])
    watch = tmp_path / "mailbox" / "watch"
    (watch / "host-1").write_text(said)
    os.mkfifo(watch / "host-2")
    assert mailbox.watched_names(str(tmp_path), watch.stat().st_mtime, 60) == {"a"}


def test_what_was_kept_and_spoilt_is_not_there(tmp_path):
    mailbox.keep(str(tmp_path), "site-x.json", "{}")
    place = tmp_path / "mailbox" / "site-x.json"
    place.write_bytes(b"\xff")
    assert mailbox.read_kept(str(tmp_path), "site-x.json", 60, place.stat().st_mtime) is None
