"""The fixtures of cells: see ``checking/cell_fixtures.py``."""

from cell_fixtures import engine_of, measured, slowly, swept, tokens_of

__all__ = ["engine_of", "measured", "slowly", "swept", "tokens_of"]
