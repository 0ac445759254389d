"""The Python environment of the ordinary user, as whom Airflow and jobs run.

A checkout, and the interpreter of its `.venv`, may lie where only root can enter. So the user gets an environment of the
distribution's python3 in a cache that everybody can read, and a copy of the package with its entry points.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from throwaway.packages import Unavailable

CHECKOUT = Path(__file__).resolve().parent.parent
LOCK = CHECKOUT / "requirements" / "airflow-3.3.lock"
CACHE = Path("/var/cache/airflow-profsched")
SYSTEM_PYTHON = "/usr/bin/python3"


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python and where it finds this package.

    Args:
        python: the interpreter.
        stage: the directory for PYTHONPATH.
    """

    python: Path
    stage: Path

    def variables(self) -> dict[str, str]:
        """Return the variables that a process in this environment needs."""
        path = f"{self.stage}/bin:{self.python.parent}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
        return {"PATH": path, "PYTHONPATH": str(self.stage)}


def make(stage: Path, lock: Path = LOCK) -> Environment:
    """Make the environment, or take it from the cache, and stage the package.

    Args:
        stage: a new directory that the user can enter.
        lock: the pins.

    Returns:
        The environment. Who is not root uses this process's own.

    Raises:
        Unavailable: it cannot be made here.
    """
    _stage(stage)
    python = _cached(lock) / "bin" / "python" if os.geteuid() == 0 else Path(sys.executable)
    command = stage / "bin" / "profsched"  # the staged one names this process's Python, which the user may not reach
    command.write_text(
        f"#!{python}\nimport sys\nfrom airflow_profsched.cli import main\nsys.exit(main())\n", encoding="utf-8"
    )
    command.chmod(0o755)
    return Environment(python, stage)


def _uv(*argv: str, **variables: str) -> None:
    fixed = {"UV_CACHE_DIR": str(CACHE / "uv"), "UV_PYTHON_DOWNLOADS": "never", "UV_SYSTEM_CERTS": "true"}
    env = {**os.environ, **fixed, **variables}
    if os.geteuid() != 0:
        del env["UV_CACHE_DIR"]
    uv = Path(sys.executable).with_name("uv")
    done = subprocess.run([uv, *argv], env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Unavailable(f"uv {' '.join(argv[:3])} … ended with {done.returncode}: {done.stderr[-2000:]}")


def _cached(lock: Path) -> Path:
    digest = hashlib.sha256(lock.read_bytes() + _version().encode()).hexdigest()[:16]
    CACHE.mkdir(parents=True, exist_ok=True)
    CACHE.chmod(0o755)
    place = CACHE / f"env-{digest}"
    with (CACHE / "lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # several runs may start at once
        if not (place / "complete").exists():
            print(f"making the environment of the ordinary user in {place} …", flush=True)
            _uv("venv", "-q", "--clear", "--python", SYSTEM_PYTHON, str(place))
            _uv("pip", "install", "-q", "--compile-bytecode", "-r", str(lock), VIRTUAL_ENV=str(place))
            (place / "complete").touch()
    return place


def _version() -> str:
    try:
        return subprocess.check_output([SYSTEM_PYTHON, "--version"], text=True)
    except OSError as error:
        raise Unavailable(f"{SYSTEM_PYTHON} is missing: the ordinary user needs a Python that it can run") from error


def _stage(stage: Path) -> None:
    stage.mkdir(parents=True, exist_ok=True)
    stage.chmod(0o755)
    own = {"VIRTUAL_ENV": str(Path(sys.prefix))}
    _uv("pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(stage), str(CHECKOUT), **own)
    # Airflow's folder of DAGs and the tests' programs come from the checkout as well, which the user may not enter.
    for path in stage.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
