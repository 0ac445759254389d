"""Carries verbs of the Slurm room, as whoever runs it: asks come as JSON lines, so do the answers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import sys

from airflow_profsched.cluster.exchange import arun, run
from airflow_profsched.cluster.transports import AsyncLocalSender, LocalSender
from airflow_profsched.core.errors import ProfschedError
from airflow_profsched.core.jobs import JobRef
from airflow_profsched.slurm import cli
from airflow_profsched.slurm.site import read_site

ENV = {"SLURM_CONF": os.environ["SLURM_CONF"]}
VERBS = {
    "submit": cli.submit,
    "find": cli.find,
    "ours": cli.ours,
    "cancel": cli.cancel,
    "nudge": cli.nudge,
    "read_site": read_site,
}


def verb(name, words):
    """Begin a conversation."""
    if name == "query":
        refs, details, release, accounting = words
        asked = [[JobRef(**ref) for ref in group] for group in (refs, details)]
        return cli.query(*asked, release=tuple(release), accounting=accounting)
    return VERBS[name](*words)


def main():
    """Carry one verb per line."""
    for line in sys.stdin:
        how, name, words = json.loads(line)
        try:
            if how == "blocking":
                answer = run(verb(name, words), LocalSender(env=ENV))
            else:
                answer = asyncio.run(arun(verb(name, words), AsyncLocalSender(env=ENV)))
            said = {"answer": answer}
        except ProfschedError as error:
            said = {"error": type(error).__name__, "words": str(error)}
        print(json.dumps(said, default=dataclasses.asdict), flush=True)


main()
