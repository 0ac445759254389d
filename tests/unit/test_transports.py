"""Both senders carry real processes by the same rules."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import pwd
import stat
import time

import pytest

from airflow_profsched.cluster.exchange import Command, Look, ReadFile
from airflow_profsched.cluster.transports import AsyncLocalSender, LocalSender
from airflow_profsched.core.errors import ClusterUnavailableError, LostReplyError


def blocking(request, **options):
    return LocalSender(**options)(request)


def awaited(request, **options):
    return asyncio.run(AsyncLocalSender(**options)(request))


both = pytest.mark.parametrize("send", [blocking, awaited])


@pytest.fixture
def put(tmp_path):
    """Lay a command into a directory of the site's."""

    def lay(name, *lines):
        place = tmp_path / name
        place.write_text("\n".join(["#!/bin/sh", *lines, ""]), encoding="utf-8")
        place.chmod(place.stat().st_mode | stat.S_IXUSR)
        return str(tmp_path)

    return lay


def until(ready, seconds=5.0):
    """Whether something is so within some seconds."""
    end = time.monotonic() + seconds
    while not ready() and time.monotonic() < end:
        time.sleep(0.02)
    return ready()


def gone(pid):
    """Whether a process has ended; who is dead and not yet buried counts as gone."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):  # it went before it was read, or while
        return True


@both
def test_code_output_and_error_come_back_and_bytes_that_are_no_text_do_no_harm(send, put):
    place = put("squeue", r"printf 'a\377b'; echo wrong >&2; exit 3")
    reply = send(Command(("squeue",)), bin_dir=place)
    assert (reply.code, reply.out, reply.err) == (3, "a\ufffdb", "wrong\n")


@both
def test_a_command_ended_by_a_signal_has_a_negative_code(send, put):
    assert send(Command(("squeue",)), bin_dir=put("squeue", "kill -9 $$")).code == -9


@both
def test_words_and_input_arrive_as_they_are(send, put):
    place = put("sbatch", 'for word in "$@"; do printf "<%s>" "$word"; done; cat')
    reply = send(Command(("sbatch", "a b", "$HOME", "`id`", ""), stdin="#!/bin/sh\nü\n"), bin_dir=place)
    assert reply.out == "<a b><$HOME><`id`><>#!/bin/sh\nü\n"


@both
def test_a_command_that_does_not_read_its_input_is_no_error(send, put):
    assert send(Command(("sbatch",), stdin="x" * 1_000_000), bin_dir=put("sbatch", "echo 12")).out == "12\n"


@both
def test_the_environment_is_clean_and_of_our_own_making(send, put, monkeypatch):
    """The worker's own SLURM_* and SBATCH_* would be options of our commands."""
    for name in (
        "SLURM_PARTITION",
        "SBATCH_QOS",
        "SQUEUE_FORMAT",
        "SACCT_FORMAT",
        "SCANCEL_QOS",
        "PMIX_RANK",
        "SECRET",
    ):
        monkeypatch.setenv(name, "the worker's")
    monkeypatch.setenv("HOME", "/nowhere")
    monkeypatch.setenv("USER", "nobody-else")
    given = {"SLURM_CONF": "/etc/x.conf", "SLURM_CLUSTERS": "west"}
    place = put("squeue", "exec env -0")
    out = send(Command(("squeue",), env=(("SLURM_DEBUG", "1"),)), bin_dir=place, env=given).out
    seen = dict(line.split("=", 1) for line in out.split("\0") if line)
    user = pwd.getpwuid(os.geteuid())
    assert {name: seen[name] for name in given} == given
    assert (seen["HOME"], seen["USER"], seen["LOGNAME"]) == (user.pw_dir, user.pw_name, user.pw_name)
    assert seen["SLURM_TIME_FORMAT"] == "%s", "epoch seconds: no time zone has to be guessed"
    assert seen["PATH"].startswith(f"{place}:/usr/")
    known = {
        "HOME",
        "USER",
        "LOGNAME",
        "SHELL",
        "PATH",
        "LC_ALL",
        "SLURM_TIME_FORMAT",
        "SLURM_DEBUG",
        "PWD",
        "_",
        "SHLVL",
        "OLDPWD",
    }
    assert set(seen) - known == set(given)


@both
def test_a_missing_command_is_said_in_words(send):
    with pytest.raises(ClusterUnavailableError, match=r"nosuch is not on this host .*slurm_bin_dir"):
        send(Command(("nosuch",)))


@both
def test_a_command_that_cannot_be_started_has_asked_nothing(send, put):
    long = "x" * 200_000  # Linux allows 128 KiB a word
    with pytest.raises(ClusterUnavailableError, match="squeue cannot be started on this host") as caught:
        send(Command(("squeue", long), idempotent=False), bin_dir=put("squeue", "true"))
    assert not isinstance(caught.value, LostReplyError)


@both
@pytest.mark.parametrize(("idempotent", "error"), [(True, ClusterUnavailableError), (False, LostReplyError)])
def test_who_does_not_answer_in_time_is_ended_with_all_its_children(send, put, tmp_path, idempotent, error):
    place = put("sbatch", f"sleep 60 & echo $! > {tmp_path}/child; wait")
    begun = time.monotonic()
    with pytest.raises(ClusterUnavailableError, match=r"sbatch gave no answer within 1 s") as caught:
        send(Command(("sbatch",), idempotent=idempotent, timeout_s=1.0), bin_dir=place)
    assert type(caught.value) is error
    assert time.monotonic() - begun < 10
    assert until(lambda: gone(int((tmp_path / "child").read_text(encoding="utf-8"))))


def test_a_trigger_that_is_cancelled_leaves_no_process(put, tmp_path):
    place = put("squeue", f"echo $$ > {tmp_path}/pid; exec sleep 60")
    noted = tmp_path / "pid"

    async def cancelled():
        asking = asyncio.create_task(AsyncLocalSender(bin_dir=place)(Command(("squeue",))))
        assert await asyncio.to_thread(until, lambda: noted.exists() and noted.read_text(encoding="utf-8").strip())
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        return await asyncio.to_thread(until, lambda: gone(int(noted.read_text(encoding="utf-8"))))

    assert asyncio.run(cancelled())


@both
def test_looks_and_files_are_answered_from_the_shared_directory(send, tmp_path):
    attempt = tmp_path / "dag" / "attempt-1"
    attempt.mkdir(parents=True)
    (attempt / "job.log").write_text("first\nlast\n", encoding="utf-8")
    assert send(ReadFile(str(tmp_path), f"{attempt}/job.log", 100)).out == "first\nlast\n"
    seen = json.loads(send(Look(str(tmp_path), str(attempt))).out)
    assert seen["markers"] == []
