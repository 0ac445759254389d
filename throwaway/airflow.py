"""Airflow's four processes on SQLite, as an ordinary user, in a directory of their own."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from throwaway import users
from throwaway.environment import Environment
from throwaway.slurm import free_ports

PARTS = ("api-server", "scheduler", "dag-processor", "triggerer")
ENDED = ("success", "failed", "upstream_failed", "skipped", "removed")


@dataclass
class AirflowStack:
    """A whole Airflow; a context manager.

    Args:
        home: AIRFLOW_HOME, a new directory.
        environment: which Python, and where it finds this package.
        user: as whom; None: as this process's user.
        env: further variables, such as SLURM_CONF and AIRFLOW__PROFSCHED__POLICY_FILE.
    """

    home: Path
    environment: Environment
    user: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    port: int = 0
    _running: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    _variables: dict[str, str] = field(default_factory=dict)
    _token: str = ""

    def __enter__(self) -> Self:
        """Bring it up."""
        return self.up()

    def __exit__(self, *_: object) -> None:
        """Take it down."""
        self.down()

    @property
    def dags(self) -> Path:
        """The folder of DAGs."""
        return self.home / "dags"

    # ------------------------------------------------------------------------------------------------ life

    def up(self) -> Self:
        """Start the four processes and wait until all are healthy.

        Returns:
            Itself.

        Raises:
            RuntimeError: they are not healthy within two minutes; the message ends with their logs.
        """
        self.prepare()
        for part in PARTS:
            self.start(part)
        self._wait_healthy()
        return self

    def prepare(self) -> None:
        """Make the home and the database, without starting anything."""
        for place in (self.home, self.dags, self.home / "logs"):
            place.mkdir(parents=True, exist_ok=True)
            if self.user is not None:
                shutil.chown(place, self.user)
        api, trigger_log, worker_log = free_ports(3)
        self.port = self.port or api
        self._variables = {
            **self.environment.variables(),
            **_settings(self.home, self.port, trigger_log, worker_log),
            **self.env,
        }
        done = self.cli("db", "migrate")
        if done.returncode:
            raise RuntimeError(f"airflow db migrate ended with {done.returncode}: {done.stderr[-2000:]}")

    def start(self, part: str) -> None:
        """Start one of the four processes.

        Args:
            part: `api-server`, `scheduler`, `dag-processor` or `triggerer`.
        """
        with (self.home / "logs" / f"{part}.out").open("ab") as out:
            self._running[part] = subprocess.Popen(
                [self.environment.python, "-m", "airflow", part],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                cwd=self.home,
                start_new_session=True,
                **users.run_as(self.user, self._variables),
            )

    def kill(self, part: str, number: int = signal.SIGKILL) -> None:
        """Send a signal to one of the four processes, with all its children.

        Args:
            part: which.
            number: the signal.
        """
        process = self._running[part]
        os.killpg(process.pid, number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            process.wait(timeout=60)
            del self._running[part]

    def down(self) -> None:
        """End everything that was started; the home stays, for whoever wants to read its logs."""
        for part in list(self._running):
            try:
                os.killpg(self._running[part].pid, signal.SIGTERM)
            except ProcessLookupError:
                continue
        until = time.monotonic() + 10
        for part, process in list(self._running.items()):
            try:
                process.wait(timeout=max(0.1, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.kill(part)
        _kill_everything_of(self.home)
        self._running.clear()

    def _wait_healthy(self) -> None:
        until = time.monotonic() + 120
        while time.monotonic() < until:
            dead = [part for part, process in self._running.items() if process.poll() is not None]
            if dead:
                raise RuntimeError(f"{', '.join(dead)} ended\n{self.tail_logs()}")
            try:
                health = self.api("GET", "/monitor/health")
            except (OSError, RuntimeError):
                time.sleep(0.3)
                continue
            if all((part or {}).get("status") in ("healthy", None) for part in health.values()) and _all_there(health):
                return
            time.sleep(0.3)
        raise RuntimeError(f"Airflow is not healthy after two minutes\n{self.tail_logs()}")

    def tail_logs(self, lines: int = 15) -> str:
        """Return the last lines of what the four processes said."""
        paths = sorted((self.home / "logs").glob("*.out"))
        return "\n".join(
            "\n".join([f"--- {path.name}", *path.read_text(errors="replace").splitlines()[-lines:]]) for path in paths
        )

    @property
    def variables(self) -> dict[str, str]:
        """The variables of its processes."""
        return dict(self._variables)

    def cli(self, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run an `airflow` command as the user."""
        options = users.run_as(self.user, self._variables)
        command = [str(self.environment.python), "-m", "airflow", *argv]
        return subprocess.run(command, capture_output=True, text=True, check=False, cwd=self.home, **options)

    # ------------------------------------------------------------------------------------------------ REST

    @property
    def address(self) -> str:
        """The UI's address."""
        return f"http://127.0.0.1:{self.port}"

    def api(self, method: str, path: str, body: Any = None) -> Any:
        """Ask the REST API.

        Args:
            method: such as GET.
            path: below `/api/v2`.
            body: JSON to send.

        Returns:
            The answer.

        Raises:
            RuntimeError: it said no.
        """
        if not self._token and not path.startswith("/monitor"):
            self._token = self._request("GET", "/auth/token")["access_token"]
        return self._request(method, f"/api/v2{path}", body)

    def _request(self, method: str, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        request = urllib.request.Request(self.address + path, data, headers, method=method)  # noqa: S310 - our own host
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:  # noqa: S310 - likewise
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{method} {path}: {error.code} {error.read()[:500]!r}") from error
        return json.loads(text) if text else None

    def wait_for_dag(self, dag_id: str, seconds: float = 60) -> None:
        """Wait until a DAG has been parsed, and switch it on."""
        until = time.monotonic() + seconds
        while True:
            try:
                self.api("PATCH", f"/dags/{dag_id}", {"is_paused": False})
                self.api("GET", f"/dags/{dag_id}/tasks")  # its serialised form may come a moment later
            except RuntimeError:
                if time.monotonic() > until:
                    errors = self.api("GET", "/importErrors")
                    raise RuntimeError(f"DAG {dag_id} was not parsed: {errors}") from None
                time.sleep(0.5)
            else:
                return

    def trigger(self, dag_id: str, conf: Mapping[str, Any] | None = None) -> str:
        """Start a DAG run.

        Args:
            dag_id: the DAG.
            conf: its configuration.

        Returns:
            The run's id.
        """
        body = {"conf": dict(conf or {}), "logical_date": None}
        return str(self.api("POST", f"/dags/{dag_id}/dagRuns", body)["dag_run_id"])

    def run_state(self, dag_id: str, run_id: str) -> str:
        """Return how a DAG run stands."""
        return str(self.api("GET", f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}")["state"])

    def wait(self, dag_id: str, run_id: str, seconds: float) -> str:
        """Wait until a DAG run has ended.

        Returns:
            Its state.
        """
        until = time.monotonic() + seconds
        while (state := self.run_state(dag_id, run_id)) not in ENDED:
            if time.monotonic() > until:
                raise RuntimeError(f"{dag_id} {run_id} is {state} after {seconds:.0f} s\n{self.tail_logs()}")
            time.sleep(0.5)
        return state

    def task_instances(self, dag_id: str, run_id: str) -> list[dict[str, Any]]:
        """Return the task instances of a DAG run."""
        return list(
            self.api("GET", f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}/taskInstances?limit=200")["task_instances"]
        )

    def task(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        """Return one task instance."""
        return dict(self.api("GET", f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}/taskInstances/{task_id}"))

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value", map_index: int = -1) -> Any:
        """Return an XCom's value; None where there is none."""
        path = f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}/taskInstances/{task_id}/xcomEntries/{key}"
        try:
            return self.api("GET", f"{path}?map_index={map_index}&deserialize=true")["value"]
        except RuntimeError:
            return None

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1, map_index: int = -1) -> str:
        """Return a task's log."""
        path = (
            f"/dags/{dag_id}/dagRuns/{_quoted(run_id)}/taskInstances/{task_id}/logs/{try_number}?map_index={map_index}"
        )
        content = self.api("GET", path)["content"]
        return "\n".join(str(line.get("event", line)) if isinstance(line, dict) else str(line) for line in content)


def _quoted(run_id: str) -> str:
    return urllib.parse.quote(run_id, safe="")


def _all_there(health: Mapping[str, Any]) -> bool:
    wanted = ("metadatabase", "scheduler", "triggerer", "dag_processor")
    return all((health.get(part) or {}).get("status") == "healthy" for part in wanted)


def _kill_everything_of(home: Path) -> None:
    """End workers that a killed scheduler has left behind: all of this Airflow carry its AIRFLOW_HOME."""
    mark = f"AIRFLOW_HOME={home}\0".encode()
    for name in os.listdir("/proc"):
        if name.isdigit() and int(name) != os.getpid():
            try:
                if mark in Path(f"/proc/{name}/environ").read_bytes():
                    os.kill(int(name), signal.SIGKILL)
            except OSError:
                continue


def _settings(home: Path, port: int, trigger_log: int, worker_log: int) -> dict[str, str]:
    address = f"http://127.0.0.1:{port}"
    return {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__API__BASE_URL": address,
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__API_AUTH__JWT_SECRET": secrets.token_urlsafe(48),
        "AIRFLOW__CORE__DAGS_FOLDER": str(home / "dags"),
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{address}/execution/",
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor",
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__PARALLELISM": "4",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "5",
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "AIRFLOW__LOGGING__TRIGGER_LOG_SERVER_PORT": str(trigger_log),
        "AIRFLOW__LOGGING__WORKER_LOG_SERVER_PORT": str(worker_log),
        "AIRFLOW__SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.2",
    }
