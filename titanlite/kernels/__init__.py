"""Attention kernels: the choice of backend, variable-length documents, partial attention."""
