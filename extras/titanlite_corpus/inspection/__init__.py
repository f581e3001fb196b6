"""A look at the data: samples by number, position or step, and where a text is in a corpus."""
