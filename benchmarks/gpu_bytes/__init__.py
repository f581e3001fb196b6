"""What a training step does on a GPU that this machine does not have; see __main__.py."""
