"""A run on any number of ranks: its layout, idle sequences, and ranks that wait as spares."""

from __future__ import annotations
