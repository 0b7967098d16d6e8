"""Run folders: run.json records what the run was made from and how it ended; the tables lie beside it.

Every file is first written under a temporary name and then renamed, so a file that exists is complete. Only one process
at a time can write into a run folder. A run that stopped half way can be continued with the same kind, configuration
and inputs. The finished files are reused, after some of their numbers were computed again and compared
(``recomputed``); runs that do not compare need the same software and device. Nothing in this package loads torch.
"""

from .log import LOG_FILE, RunLog, read_log, read_log_lines
from .place import Place, place_of_run
from .provenance import CIRCUMSTANCE, package_versions
from .reading import PAGE_FILE, RUN_FILE, Run, Tables, read_run, run_state
from .result import Finding, Result
from .writing import (
    RunWriter,
    add_to_run,
    check_folder_free,
    create_run,
    default_run_folder,
    refuse_file_of_run,
    utc_now_text,
    write_atomically,
)

__all__ = [
    "CIRCUMSTANCE",
    "LOG_FILE",
    "PAGE_FILE",
    "RUN_FILE",
    "Finding",
    "Place",
    "Result",
    "Run",
    "RunLog",
    "RunWriter",
    "Tables",
    "add_to_run",
    "check_folder_free",
    "create_run",
    "default_run_folder",
    "package_versions",
    "place_of_run",
    "read_log",
    "read_log_lines",
    "read_run",
    "refuse_file_of_run",
    "run_state",
    "utc_now_text",
    "write_atomically",
]
