"""The system's Chromium; run as a script, says on a machine without one that the tests in a browser were left out."""

import os
import shutil
import sys

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
ABSENT = "no Chromium was found: apt-get install chromium, or name it in CHROMIUM"


def path() -> str | None:
    return os.environ.get("CHROMIUM") or next(
        (found for name in NAMES if (found := shutil.which(name))), None
    )


if __name__ == "__main__" and path() is None:
    sys.stdout.write(f"The browser tests were left out, since {ABSENT}.\n")
