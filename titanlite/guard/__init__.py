"""The guard: detect steps that would damage the model, and handle them on all ranks together."""
