"""Parts of python -m titanlite_lab scaling-laws: one module for each command."""
