"""What a resumed run trusts of a function: what it does, not its name, in any process; what cannot be known is said."""

import functools
import os
import re
import subprocess
import sys
import textwrap
import types
from collections import Counter, OrderedDict, defaultdict
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from lenses import speaking

from sink_lens.edits import metrics
from sink_lens.edits.constructors import edit, freeze, scale, zero
from sink_lens.engine.cells import cell_of
from sink_lens.engine.code_identity import hash_code
from sink_lens.models.load import wrap
from sink_lens.records import UNKNOWN
from tests.tiny_families import tiny


def llama(seed=0):
    return wrap(tiny("llama", seed=seed))


HEX = re.compile("[0-9a-f]{64}")


def notebook(text, **names):
    """The function f of a notebook's cells, with what is already defined there."""
    found = {"__name__": "__main__", "torch": torch, "np": np, "functools": functools, **names}
    exec(compile(textwrap.dedent(text), "<cell>", "exec"), found)
    return found.get("f")


def own_module(text):
    module = types.ModuleType("of_my_own")
    module.__file__ = "/home/somebody/of_my_own.py"
    exec(textwrap.dedent(text), module.__dict__)
    return module


SAME = {
    "comments": ("def f(run):{}\n    return run.loss", "", "\n    # mean\n"),
    "a docstring": ("def f(x):\n    {}\n    return x + 1", "'One.'", "'Two.'"),
    "something that is not called": ("def g(x): return {}\ndef f(x): return x", "1", "2"),
}
OTHER = {
    "the code": ("def f(run): return {}run.loss", "", "-"),
    "a number": ("def f(x): return x * {}", *"23"),
    "the type of a number": ("def f(x): return x * {}", "1", "True"),
    "an attribute": ("def f(run): return run.{}", "loss", "mass"),
    "a helper's helper": ("def h(x): return {}\ndef g(x): return h(x)\ndef f(x): return g(x)", "x", "-x"),
    "a helper in a comprehension": ("def g(x): return {}\ndef f(x): return [g(one) for one in x]", "x", "-x"),
    "a function within": ("def f(x):\n    def g(y): return {}\n    return g(x)", "y", "-y"),
    "a default": ("def f(x, k={}): return x * k", "1", "2"),
    "a default by name": ("def f(x, *, k={}): return x * k", "1", "2"),
    "a closure": ("def make(k):\n    return lambda x: x * k\nf = make({})", "1", "2"),
    "a global number": ("K = {}\ndef f(x): return x * K", "1", "2"),
    "a global tensor": ("W = torch.tensor([1., 1., {}])\ndef f(x): return x @ W", "1.", "2."),
    "a global array": ("W = np.arange({})\ndef f(x): return W", "3", "3."),
    "a partial": ("def g(k, x): return x\nf = functools.partial(g, {})", "1", "2"),
    "a cached function": ("@functools.cache\ndef g(x): return {}\ndef f(x): return g(x)", "x", "-x"),
    "a decorated function": (
        "def by(k):\n    def deco(g):\n        @functools.wraps(g)\n        def h(x): return k * g(x)\n"
        "        return h\n    return deco\n@by({})\ndef f(x): return x",
        *"12",
    ),
    "a callable object": (
        "class C:\n    def __init__(self, k): self.k = k\n    def __call__(self, x): return x * self.k\nf = C({})",
        *"12",
    ),
    "a base of its class": (
        "class B:\n    def g(self, x): return {}\nclass C(B):\n    def __call__(self, x): return self.g(x)\nf = C()",
        *("x", "-x"),
    ),
    "a bound method": (
        "class C:\n    def __init__(self, k): self.k = k\n    def g(self, x): return x * self.k\nf = C({}).g",
        *"12",
    ),
    "a static method": ("class C:\n    @staticmethod\n    def g(x): return {}\ndef f(x): return C.g(x)", "x", "-x"),
    "a property": ("class C:\n    @property\n    def k(self): return {}\nc = C()\ndef f(x): return c.k", *"12"),
    "one of two that call each other": ("def g(n): return n and f(n - {})\ndef f(n): return n and g(n - 1)", *"12"),
    "a module of torch": (
        "p = torch.nn.Linear(2, 1)\nfor w in p.parameters(): w.data[:] = {}\ndef f(x): return p(x)",
        *"12",
    ),
    "a module's hook": (
        "p = torch.nn.Identity()\np.register_forward_hook(lambda m, a, x: {})\ndef f(x): return p(x)",
        "x",
        "-x",
    ),
    "a generator's state": (
        "g = torch.Generator().manual_seed({})\ndef f(x): return torch.rand(1, generator=g)",
        *"12",
    ),
    "an exception that is caught": (
        "def f(x):\n    try:\n        return x.a\n    except {}:\n        return 0",
        "KeyError",
        "ValueError",
    ),
}


def written(text, *parts):
    """The function of a text, with each of these in its gap."""
    return [notebook(text.format(one)) for one in parts]


@pytest.mark.parametrize("what", SAME)
def test_what_changes_nothing_is_the_same(what):
    one, other = written(*SAME[what])
    assert HEX.fullmatch(hash_code(one))
    assert hash_code(one) == hash_code(other)


@pytest.mark.parametrize("what", OTHER)
def test_what_is_defined_again_is_the_same_and_with_another_part_another(what):
    (one, other), (again, _) = written(*OTHER[what]), written(*OTHER[what])
    assert HEX.fullmatch(hash_code(one))
    assert hash_code(one) == hash_code(again)
    assert hash_code(one) != hash_code(other)


def test_a_module_of_ones_own_counts_with_what_is_read_of_it():
    cell = "def f(x): return mine.g(x)"
    first, second, third = (
        own_module(f"def h(x): return x * {k}\ndef g(x): return h(x)\ndef other(x): return {rest}")
        for k, rest in ((1, 1), (2, 1), (1, 2))
    )
    one, other, rest = (hash_code(notebook(cell, mine=mine)) for mine in (first, second, third))
    assert one != other
    assert one == rest
    within = own_module("x = 1")
    within.sub = first
    deeper = hash_code(notebook("def f(x): return mine.sub.g(x)", mine=within))
    within.sub = second
    assert deeper != hash_code(notebook("def f(x): return mine.sub.g(x)", mine=within))


UNKNOWABLE = {
    "an open file": ("def f(x): return log.write('')", {"log": sys.stdout}, r"f\.log holds a "),
    "a generator": ("def f(x): return next(numbers)", {"numbers": (i for i in ())}, r"f\.numbers holds a generator"),
    "evaluated text": ("def f(x): return eval('x')", {}, r"f\.eval calls eval\(\)"),
    "a file that it opens": ("def f(x): return open('x').read()", {}, r"calls open\(\)"),
    "a module whole": ("def f(x): return getattr(mine, x)", {"mine": own_module("")}, "takes the module of_my_own"),
    "its own import": ("def f(x):\n    import not_installed\n    return x", {}, "imports the module not_installed"),
    "a helper's": ("def g(x): return log\ndef f(x): return g(x)", {"log": sys.stdout}, r"f\.g\.log holds a "),
    "an attribute's": ("class C:\n    def __call__(s): ...\nf = C()\nf.log = log", {"log": sys.stdout}, "log holds a"),
    "a tensor without values": ("W = torch.ones(2, device='meta')\ndef f(x): return W", {}, "a tensor without values"),
}


@pytest.mark.parametrize("what", UNKNOWABLE)
def test_what_cannot_be_known_is_said_with_the_names_that_lead_to_it(what):
    text, names, why = UNKNOWABLE[what]
    found = hash_code(notebook(text, **names))
    assert found.startswith(UNKNOWN)
    assert re.search(why, found)


class Kind(Enum):
    """A kind."""

    A = 1


@dataclass
class Settings:
    """Settings of a metric."""

    k: int = 1
    names: list = field(default_factory=list)

    def __call__(self, run):
        return run.loss * self.k


def test_values_of_all_kinds_can_be_known():
    values = [
        *(None, True, 1, 1.5, float("nan"), 1j, "ä", b"\0", ..., slice(1, None), range(3), (1, [2], {"a": {3}})),
        *(np.float32(1), np.array(["a", None], dtype=object), np.random.default_rng(0), np.add, np.vectorize(abs)),
        *(torch.float32, torch.device("cpu"), torch.Size([1]), torch.ones(0), torch.ones(2, dtype=torch.bfloat16)),
        *(Counter("ab"), OrderedDict(a=1), defaultdict(list), Path("x"), re.compile("a"), Kind.A, Settings(), len),
        *(str.upper, "a".upper, [1].append, torch.add, torch.Tensor.sum, Settings, list[int], pd.DataFrame({"a": [1]})),
        *(speaking().tokenizer, functools.partialmethod(len), property(len), Settings.__call__, llama()),
        *(zero("z"), scale("z", 2.0), freeze("z", {0: torch.ones(1)}), metrics.loss(), metrics.logit_difference(5, 6)),
        *(cell_of(zero("z")), llama().plain),
    ]
    found = [hash_code(one) for one in values]
    assert [one for one in found if not HEX.fullmatch(one)] == []
    assert len(set(found)) == len(found)


def test_models_tensors_and_tokenizers_count_by_what_they_hold():
    assert hash_code(llama()) == hash_code(llama())
    assert hash_code(llama()) != hash_code(llama(seed=1))
    tokenizer = speaking().tokenizer
    before = hash_code(tokenizer)
    tokenizer(["a", "a b"], padding=True, truncation=True, max_length=3)
    assert hash_code(tokenizer) == before
    assert hash_code(torch.ones(2)) == hash_code(torch.ones(4)[::2])
    assert hash_code(torch.ones(2)) != hash_code(torch.ones(2, 1))


def things():
    """Functions and values whose hashes could hang on the process."""
    found = [one for of in (SAME, OTHER) for row in of.values() for one in written(*row)]
    found += [notebook("def f(x): return x in {'a', 'b', 'c'}"), {"x", "y", "z"}, Kind, Settings, Settings(2)]
    return [*found, cell_of(zero("z")), edit("z", lambda x, at: x), metrics.logit_difference([5, 6], 7)]


def test_a_hash_is_the_same_in_another_process_under_another_hash_seed():
    paths = [str(Path(__file__).parent), *sys.path]
    code = f"import sys; sys.path[:0] = {paths}; import test_code_identity as own; "
    code += "print(*map(own.hash_code, own.things()), sep='\\n')"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [hash_code(one) for one in things()]
