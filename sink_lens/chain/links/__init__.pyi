"""The public names, each from the module that defines it: `__init__.py` reads this file."""

from .order import LINKS as LINKS
