"""Sweeps: thousands of cells, each an edit and what it does to some metrics, with what they share computed once."""
