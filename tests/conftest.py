"""What all tests share. Airflow is configured before anything imports it; nothing here patches our own functions."""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import tempfile

_HOME = pathlib.Path(tempfile.mkdtemp(prefix="profsched-airflow-"))
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
(_HOME / "dags").mkdir()
os.environ.update(
    {
        "AIRFLOW_HOME": str(_HOME),
        "AIRFLOW__CORE__DAGS_FOLDER": str(_HOME / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__UNIT_TEST_MODE": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{_HOME}/airflow.db",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
    }
)

import pytest  # noqa: E402 - Airflow's configuration comes first
from hypothesis import settings  # noqa: E402 - likewise

# CI judges a change, not the luck of the day: there the examples are always the same. Elsewhere new ones are looked for.
settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

REQUIRED = {name for name in os.environ.get("PROFSCHED_REQUIRE", "").split(",") if name}
"""Suites that must run: where one of their tests is skipped, the run fails (a skipped run is not a pass)."""

_skipped: list[str] = []
_ran: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    marks = REQUIRED & set(report.keywords)
    if report.skipped and marks and not hasattr(report, "wasxfail"):
        _skipped.append(
            f"{report.nodeid}: {report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr}"
        )
    elif report.when == "call":
        _ran.update(marks)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if session.config.option.collectonly or not REQUIRED:
        return
    missing = sorted(REQUIRED - _ran)
    if (_skipped or missing) and exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if terminalreporter.config.option.collectonly or not REQUIRED:
        return
    for line in _skipped:
        terminalreporter.write_line(f"skipped although this run requires it (PROFSCHED_REQUIRE): {line}", red=True)
    for name in sorted(REQUIRED - _ran):
        terminalreporter.write_line(f"no test of the suite {name!r} ran although PROFSCHED_REQUIRE names it", red=True)
