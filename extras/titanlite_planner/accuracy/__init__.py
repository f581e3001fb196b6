"""Published runs of others, and how far the estimates are from them."""
