"""Check of muP: activations of models of several widths, and their picture."""
