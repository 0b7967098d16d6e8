"""What is promised to the last bit holds with the kernels of every instruction set: libraries sum in other orders."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sink_lens.models.tiny import TINY_FAMILIES

SETTINGS = {
    "native": {},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "default": {"ATEN_CPU_CAPABILITY": "default", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2", "ONEDNN_MAX_CPU_ISA": "SSE41"},
}
"""What PyTorch, MKL and oneDNN are told; a CPU without AVX2 runs what it has, and the test's record says so."""
PROGRAM = Path(__file__).parent / "checking" / "equal_bits.py"


@functools.cache
def found_under(setting):
    """What ``checking/equal_bits.py`` found in a process of its own."""
    names = {name for given in SETTINGS.values() for name in given}
    kept = {name: value for name, value in os.environ.items() if name not in names}
    env = kept | SETTINGS[setting] | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, str(PROGRAM)], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("setting", SETTINGS)
def test_bits_are_equal_where_the_products_are_the_same_under_every_instruction_set(setting, record_property):
    found, native = found_under(setting), found_under("native")["capability"]
    widest = {"native": native, "avx2": "AVX2" if native.startswith("AVX") else native, "default": "DEFAULT"}
    record_property("capability", found["capability"])
    assert found["capability"] == widest[setting]
    assert found["families"] == len(TINY_FAMILIES)
    assert found["off"] == []
