"""Seconds of a step: kernels, collectives, pipeline."""
