"""What Slurm's commands say when something is wrong."""

from __future__ import annotations

import re

from airflow_profsched.cluster.exchange import Command, Reply
from airflow_profsched.core.errors import ClusterError, ClusterUnavailableError

_NO_ANSWER = re.compile(
    "unable to contact slurm|socket timed out|connection refused|connection reset|zero bytes were transmitted"
    "|transport endpoint|slurm_persist_conn|slurmdbd: (?:failed|connection)|unable to establish controller"
    "|temporarily unable to accept|resource temporarily unavailable|in standby mode|authentication error|munge encode failed"
    "|open_slurmdb|sending message|communication connection failure|failed to connect"
    "|unable to query jobs state"  # all that --only-job-state says of any failure, on 24.11 and 26.05
    "|failed to fetch config|establish a configuration source",  # configless, and the controller is away
    re.IGNORECASE,
)


def said(reply: Reply) -> str:
    """Return what a command said, errors first, in one line of at most 2,000 characters."""
    lines = [line.strip() for line in (*reply.err.splitlines(), *reply.out.splitlines()) if line.strip()]
    return "; ".join(lines)[:2000] or "nothing"


def unanswered(reply: Reply) -> bool:
    """Whether a failed command failed because the daemon behind it did not answer."""
    return reply.code < 0 or _NO_ANSWER.search(reply.err) is not None


def checked(reply: Reply, command: Command) -> str:
    """Return what a command printed.

    Args:
        reply: its reply.
        command: what was asked.

    Returns:
        Its standard output.

    Raises:
        ClusterUnavailableError: the daemon behind it did not answer: nothing may be concluded.
        ClusterError: it failed otherwise.
    """
    if not reply.code:
        return reply.out
    words = f"{' '.join(command.argv[:4])} … ended with {reply.code}: {said(reply)}"
    if unanswered(reply):
        raise ClusterUnavailableError(words)
    raise ClusterError(words)
