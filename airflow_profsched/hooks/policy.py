"""The policy file, as Airflow's configuration names it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from airflow.providers.common.compat.sdk import conf

from airflow_profsched.core.errors import PolicyError

if TYPE_CHECKING:
    from airflow_profsched.core.policyfile import Policy


def policy_path() -> str:
    """Return the path of `[profsched] policy_file`; empty where none is configured."""
    return str(conf.get("profsched", "policy_file", fallback=""))


def load_policy(path: str | None = None) -> Policy:
    """Read the policy file.

    Args:
        path: the file; None: the one that Airflow's configuration names.

    Returns:
        The policy; the built-in one (profiles, no clusters) where no file is configured.

    Raises:
        PolicyError: the file cannot be read, or is wrong.
    """
    from airflow_profsched.core.policyfile import builtin_policy  # noqa: PLC0415 - not while a DAG is parsed

    path = policy_path() if path is None else path
    if not path:
        return builtin_policy()
    try:
        return _read(path, Path(path).stat().st_mtime_ns)
    except OSError as error:
        msg = (
            f"the policy file {path} cannot be read ({error.strerror}): "
            "see [profsched] policy_file in Airflow's configuration"
        )
        raise PolicyError(msg) from error


@lru_cache(maxsize=4)
def _read(path: str, _mtime_ns: int) -> Policy:
    from airflow_profsched.core.policyfile import load_policy as load  # noqa: PLC0415 - not while a DAG is parsed

    return load(Path(path).read_text(encoding="utf-8", errors="replace"), path)
