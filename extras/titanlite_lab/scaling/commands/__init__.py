"""Parts of scripts/scaling_laws.py: one module for each command."""
