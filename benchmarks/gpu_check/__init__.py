"""What scripts/check_gpu.py runs: checks of a GPU machine and their report."""
