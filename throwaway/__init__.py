"""Clusters, Airflow and environments that live in a temporary directory, for the tests, the demo and the tutorial."""
