"""Runs on the node, around the user's program: the process that the cluster signals.

Standard library only, syntax and library of Python 3.6 (RHEL 8's). It reaches the node as one file, a zip that python runs
(:mod:`airflow_profsched.cluster.carry`), so that it works where this package is not installed. What it promises to programs
is the contract in docs/reference/job-side.md.
"""
