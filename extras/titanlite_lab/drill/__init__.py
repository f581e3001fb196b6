"""Parts of python -m titanlite_lab drill."""
