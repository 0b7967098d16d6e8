"""A run is one folder: run.json says what it was made from and how it ended; its tables stand beside it.

Every file is written under another name and renamed when it is whole, so a file that exists is complete;
run.json lists each with its size and hash. One process at a time holds a run folder. A run that stopped half
way is continued by one of the same kind, configuration, inputs, software and device, which finds the finished
files in place. Nothing here loads torch.
"""

from sink_lens.records.provenance import CIRCUMSTANCE, IDENTITY, compare_runs, versions
from sink_lens.records.reading import PAGE_FILE, RUN_FILE, Run, Tables, check_not_of_run, read_run
from sink_lens.records.writing import RunWriter, add_to_run, create_run

__all__ = [
    "CIRCUMSTANCE",
    "IDENTITY",
    "PAGE_FILE",
    "RUN_FILE",
    "Run",
    "RunWriter",
    "Tables",
    "add_to_run",
    "check_not_of_run",
    "compare_runs",
    "create_run",
    "read_run",
    "versions",
]
