"""The ground floor: pure rules. No I/O, no clock, no randomness, no logging, no Airflow; such things are arguments."""
