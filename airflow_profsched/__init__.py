"""An Apache Airflow provider: workload profiles for training and inference on Slurm and Kubernetes."""

__version__ = "0.1.0"
