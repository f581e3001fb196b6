"""Who am I among the ranks, and what do we tell each other."""
