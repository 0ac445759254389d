"""The first floor's common hall: conversations with a cluster, who carries them, who waits. It knows no Airflow."""
