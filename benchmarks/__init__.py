"""Figures that we claim, each measured beside its anchor in one run: `make bench`."""
