"""Parts of scripts/fault_drill.py."""
