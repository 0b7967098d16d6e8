"""Python runs this file in every process whose path has this folder: under HOSTILE_CPU the processes of tests too."""

import os

if os.environ.get("HOSTILE_CPU") == "1":
    import hostile_cpu

    hostile_cpu.wait_for_torch()
