"""One module for each command of `python -m titanlite_post`."""
