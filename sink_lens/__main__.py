"""``python -m sink_lens`` is the command ``sink-lens``."""

from .cli import main

if __name__ == "__main__":
    main()
