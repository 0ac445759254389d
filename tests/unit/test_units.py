from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_profsched.core import units


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("90s", 90), ("2h30m", 9000), ("1.5h", 5400), ("7d", 604800), ("1-12:00:00", 129600), ("2-03", 183600), ("02:00:00", 7200),
        ("10:30", 630), ("45", 45), (45, 45), (0.2, 1), ("100ms", 1), ("1w", 604800), (" 5m ", 300), ("0s", 0),
    ],
)  # fmt: skip
def test_durations(written, seconds):
    assert units.seconds(written) == seconds


@pytest.mark.parametrize(
    "written",
    ["", "soon", "-5s", -1, True, "5 m", "1h:00", "1e9s", "9" * 70, "9999999999s", float("inf"), None, "UNLIMITED"],
)
def test_what_is_no_duration(written):
    with pytest.raises(ValueError, match=r"duration|longer"):
        units.seconds(written)


@given(st.integers(0, 10 * 365 * 86400))
def test_slurms_spelling_is_read_back(duration_s):
    assert units.seconds(units.slurm_time(duration_s)) == duration_s


@pytest.mark.parametrize(
    ("written", "mib"),
    [
        ("512Gi", 524288),
        ("1.5TiB", 1572864),
        ("1G", 954),
        ("2048", 1),
        ("1048576", 1),
        ("1048577", 2),
        ("1Ki", 1),
        ("64GB", 61036),
        (4096, 1),
    ],
)
def test_memory_is_rounded_up(written, mib):
    assert units.mebibytes(written) == mib


@pytest.mark.parametrize("written", ["", "lots", "-1G", "1Gx", "1 2", True, "1" * 40])
def test_what_is_no_memory(written):
    with pytest.raises(ValueError, match="memory"):
        units.mebibytes(written)


def test_trackable_resources():
    assert units.tres("cpu=4,gres/gpu=512,mem=64G,node=2,billing=x") == {
        "cpu": 4,
        "gres/gpu": 512,
        "mem": 65536,
        "node": 2,
    }
    assert units.tres("mem=100") == {"mem": 1}
    assert units.tres("") == {}


@pytest.mark.parametrize(("duration_s", "words"), [(0, "0s"), (45, "45s"), (9000, "2h 30m"), (90061, "1d 1h 1m 1s")])
def test_words(duration_s, words):
    assert units.words(duration_s) == words


@given(st.text())
def test_nothing_but_value_error_leaves_the_readers(text):
    for read in (units.seconds, units.mebibytes):
        with contextlib.suppress(ValueError):
            assert read(text) >= 0
    units.tres(text) if "mem=" not in text else None
