from __future__ import annotations

import json
import os
import time

import pytest

from airflow_profsched.jobside import checkpoints


def manifest(root, name, step, size=4, written=4):
    place = root / name
    place.mkdir()
    (place / "w.bin").write_bytes(b"x" * written)
    (place / "profsched.json").write_text(json.dumps({"version": 1, "step": step, "files": {"w.bin": size}}))
    return place


def marked(root, step, mark="COMPLETE"):
    place = root / f"step-{step}"
    place.mkdir()
    if mark:
        (place / mark).touch()
    return place


def test_the_newest_complete_one_counts(tmp_path):
    manifest(tmp_path, "ckpt-1", 1)
    newest = manifest(tmp_path, "ckpt-20", 20)
    manifest(tmp_path, "ckpt-3", 3)
    assert checkpoints.newest_complete(str(tmp_path)) == (str(newest), 20)


def test_a_truncated_newest_is_passed_over(tmp_path):
    good = manifest(tmp_path, "ckpt-1", 1)
    manifest(tmp_path, "ckpt-2", 2, written=3)
    (tmp_path / "ckpt-3").mkdir()
    (tmp_path / "ckpt-4").mkdir()
    (tmp_path / "ckpt-4" / "profsched.json").write_text('{"version": 1, "st')
    assert checkpoints.newest_complete(str(tmp_path)) == (str(good), 1)


def test_step_directories_need_their_mark(tmp_path):
    marked(tmp_path, 5)
    marked(tmp_path, 7, mark="")
    assert checkpoints.newest_complete(str(tmp_path)) == (str(tmp_path / "step-5"), 5)
    marked(tmp_path, 9, mark="_SUCCESS")
    assert checkpoints.newest_complete(str(tmp_path), "step")[1] == 9
    assert checkpoints.newest_complete(str(tmp_path), "manifest") is None


def test_none_and_cannot_see_are_not_the_same(tmp_path):
    assert checkpoints.view_checkpoints(str(tmp_path))["visible"] is True
    unseen = checkpoints.view_checkpoints(str(tmp_path / "nowhere"))
    assert (unseen["visible"], "No such file" in unseen["error"]) == (False, True)


def test_links_are_not_followed(tmp_path):
    real = manifest(tmp_path, "real-1", 1)
    (tmp_path / "linked-9").symlink_to(real)
    inner = tmp_path / "ckpt-8"
    inner.mkdir()
    (inner / "profsched.json").symlink_to(real / "profsched.json")
    (inner / "w.bin").write_bytes(b"xxxx")
    assert checkpoints.newest_complete(str(tmp_path)) == (str(real), 1)


@pytest.mark.parametrize("name", ["/etc/passwd", "../real-1/w.bin", "a/../../w.bin", "bad\0name"])
def test_a_manifest_names_only_files_of_its_own(tmp_path, name):
    place = tmp_path / "ckpt-1"
    place.mkdir()
    (place / "profsched.json").write_text(
        json.dumps({"version": 1, "step": 1, "files": {name: os.path.getsize("/etc/passwd")}})
    )
    assert checkpoints.newest_complete(str(tmp_path)) is None


@pytest.mark.parametrize(
    "body",
    ["[]", "{}", '{"step": true, "files": {}}', '{"step": -1, "files": {}}', '{"step": 1, "files": 3}', "[" * 60000],
)
def test_a_manifest_that_is_none_makes_no_checkpoint(tmp_path, body):
    place = tmp_path / "ckpt-1"
    place.mkdir()
    (place / "profsched.json").write_text(body)
    assert checkpoints.newest_complete(str(tmp_path)) is None


def test_a_fifo_in_place_of_a_manifest_does_not_wait(tmp_path):
    place = tmp_path / "ckpt-1"
    place.mkdir()
    os.mkfifo(place / "profsched.json")
    assert checkpoints.newest_complete(str(tmp_path)) is None


def test_the_step_in_the_manifest_counts_where_a_name_ends_in_no_number_of_its_own(tmp_path):
    newest = manifest(tmp_path, "ckpt-a9f3", 100)
    manifest(tmp_path, "ckpt-b12", 50)
    manifest(tmp_path, "step-70", 70)
    assert checkpoints.newest_complete(str(tmp_path)) == (str(newest), 100)
    epoch = manifest(tmp_path, "epoch-3", 110)
    assert checkpoints.newest_complete(str(tmp_path)) == (str(epoch), 110)
    last = manifest(tmp_path, "last", 120)
    assert checkpoints.newest_complete(str(tmp_path)) == (str(last), 120)


def test_numbers_are_compared_as_numbers(tmp_path):
    manifest(tmp_path, "step-9", 9)
    newest = manifest(tmp_path, "step-000010", 10)
    assert checkpoints.newest_complete(str(tmp_path)) == (str(newest), 10)


def test_no_directory_on_the_way_to_a_checkpoints_file_is_a_link(tmp_path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "w.bin").write_bytes(b"xxxx")
    place = tmp_path / "ckpt-1"
    place.mkdir()
    (place / "shards").symlink_to(elsewhere)
    (place / "profsched.json").write_text(json.dumps({"version": 1, "step": 1, "files": {"shards/w.bin": 4}}))
    assert checkpoints.newest_complete(str(tmp_path)) is None
    (place / "shards").unlink()
    elsewhere.rename(place / "shards")
    assert checkpoints.newest_complete(str(tmp_path)) == (str(place), 1)


@pytest.mark.parametrize("mark", ["link", "directory", "FIFO"])
def test_a_mark_is_a_regular_file(tmp_path, mark):
    place = marked(tmp_path, 4, mark="")
    if mark == "link":
        (tmp_path / "mark").touch()
        (place / "COMPLETE").symlink_to(tmp_path / "mark")
    elif mark == "directory":
        (place / "COMPLETE").mkdir()
    else:
        os.mkfifo(place / "COMPLETE")
    assert checkpoints.newest_complete(str(tmp_path)) is None


def test_the_newest_of_ten_thousand_is_found_at_once(tmp_path):
    for step in range(10_000):
        (tmp_path / f"step-{step}").mkdir()
    marked(tmp_path, 10_000)
    marked(tmp_path, 10_001, mark="")
    began = time.perf_counter()
    assert checkpoints.newest_complete(str(tmp_path)) == (str(tmp_path / "step-10000"), 10_000)
    assert time.perf_counter() - began < 1


def test_a_checkpoint_directory_that_may_not_be_read_cannot_be_seen(tmp_path):
    place = tmp_path / "file"
    place.write_text("no directory")
    seen = checkpoints.view_checkpoints(str(place))
    assert (seen["visible"], seen["step"]) == (False, None)
    assert "Not a directory" in seen["error"]
