"""Attention kernels, variable-length documents, partial attention; what a GPU supports."""
