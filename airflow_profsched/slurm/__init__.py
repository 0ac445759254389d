"""The Slurm room: what Slurm is told and how its answers are read. It knows neither Airflow nor any other room."""
