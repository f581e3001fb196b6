"""A run on any number of ranks: its layout, ragged rounds, and ranks that wait as spares."""

from __future__ import annotations
