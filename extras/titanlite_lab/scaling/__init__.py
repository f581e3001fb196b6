"""Scaling laws: runs, fits, the compute-optimal model, a ladder of runs."""
