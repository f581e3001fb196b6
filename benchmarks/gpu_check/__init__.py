"""What python -m benchmarks.gpu_check runs: checks of a GPU machine and their report."""
