"""Attention kernels: choice of the backend, variable-length documents, partial attention."""
