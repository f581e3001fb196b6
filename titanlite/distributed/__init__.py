"""Process group, device mesh, collectives and timeouts of the ranks."""
