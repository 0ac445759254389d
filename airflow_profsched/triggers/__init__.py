"""Triggers: what waits without holding a worker."""
