"""Connections and the senders behind them: where Airflow meets a cluster."""
