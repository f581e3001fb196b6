"""A look at runs: reports, comparison, pictures, scaling laws, check of muP, downstream tasks."""
