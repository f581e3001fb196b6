"""One step of every kind of rank in this process, without the other ranks."""
