"""Plots of runs and of parallel layouts, drawn with matplotlib."""
