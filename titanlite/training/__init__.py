"""The training loop and the parts of one iteration."""
