"""Conversations as training data: templates, and labels on the answers only."""
