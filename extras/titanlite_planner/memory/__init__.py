"""Bytes of each rank at the points of a step."""
