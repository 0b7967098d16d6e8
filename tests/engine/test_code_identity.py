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

from analyses.tiny_families import tiny
from sink_lens.edits import metrics
from sink_lens.edits.constructors import edit, freeze, scale, zero
from sink_lens.engine.cells import cell_of
from sink_lens.engine.code_identity import hash_code
from sink_lens.models.load import wrap
from sink_lens.records import UNKNOWN


def llama(seed=0):
    return wrap(tiny("llama", seed=seed))


HEX = re.compile("[0-9a-f]{64}")


def notebook(text, **names):
    """The function f of a notebook's cells, with what is already defined there."""
    found = {"__name__": "__main__", "torch": torch, "np": np, "functools": functools, **names}
    exec(compile(textwrap.dedent(text), "<cell>", "exec"), found)
    return found.get("f")


def own_module(text, name="of_my_own"):
    module = types.ModuleType(name)
    module.__file__ = f"/home/somebody/{name}.py"
    exec(textwrap.dedent(text), module.__dict__)
    return module


SAME = {
    "comments": ("def f(run):\n    return run.loss", "# of a paper\n\n\ndef f(run):\n    # mean\n    return run.loss"),
    "a docstring": ("def f(x):\n    'One.'\n    return x + 1", "def f(x):\n    'Two.'\n    return x + 1"),
    "something that is not called": (
        "def g(x): return 1\ndef f(x): return x",
        "def g(x): return 2\ndef f(x): return x",
    ),
}
OTHER = {
    "the code": ("def f(run): return run.loss", "def f(run): return -run.loss"),
    "a number": ("def f(x): return x * 2", "def f(x): return x * 3"),
    "the type of a number": ("def f(x): return x * 1", "def f(x): return x * True"),
    "an attribute": ("def f(run): return run.loss", "def f(run): return run.mass"),
    "a helper": ("def g(x): return x\ndef f(x): return g(x)", "def g(x): return -x\ndef f(x): return g(x)"),
    "a helper's helper": (
        "def h(x): return x\ndef g(x): return h(x)\ndef f(x): return g(x)",
        "def h(x): return -x\ndef g(x): return h(x)\ndef f(x): return g(x)",
    ),
    "a helper in a comprehension": (
        "def g(x): return x\ndef f(x): return [g(one) for one in x]",
        "def g(x): return -x\ndef f(x): return [g(one) for one in x]",
    ),
    "a function within": (
        "def f(x):\n    def g(y): return y\n    return g(x)",
        "def f(x):\n    def g(y): return -y\n    return g(x)",
    ),
    "a default": ("def f(x, k=1): return x * k", "def f(x, k=2): return x * k"),
    "a default by name": ("def f(x, *, k=1): return x * k", "def f(x, *, k=2): return x * k"),
    "a closure": (
        "def make(k):\n    return lambda x: x * k\nf = make(1)",
        "def make(k):\n    return lambda x: x * k\nf = make(2)",
    ),
    "a global number": ("K = 1\ndef f(x): return x * K", "K = 2\ndef f(x): return x * K"),
    "a global tensor": (
        "W = torch.ones(3)\ndef f(x): return x @ W",
        "W = torch.tensor([1., 1., 2.])\ndef f(x): return x @ W",
    ),
    "a global array": ("W = np.arange(3)\ndef f(x): return W", "W = np.arange(3.)\ndef f(x): return W"),
    "a partial": (
        "def g(k, x): return x\nf = functools.partial(g, 1)",
        "def g(k, x): return x\nf = functools.partial(g, 2)",
    ),
    "a cached function": (
        "@functools.cache\ndef g(x): return x\ndef f(x): return g(x)",
        "@functools.cache\ndef g(x): return -x\ndef f(x): return g(x)",
    ),
    "a decorated function": (
        "def by(k):\n    def deco(g):\n        @functools.wraps(g)\n        def h(x): return k * g(x)\n"
        "        return h\n    return deco\n@by(1)\ndef f(x): return x",
        "def by(k):\n    def deco(g):\n        @functools.wraps(g)\n        def h(x): return k * g(x)\n"
        "        return h\n    return deco\n@by(2)\ndef f(x): return x",
    ),
    "a callable object": (
        "class C:\n    def __init__(self, k): self.k = k\n    def __call__(self, x): return x * self.k\nf = C(1)",
        "class C:\n    def __init__(self, k): self.k = k\n    def __call__(self, x): return x * self.k\nf = C(2)",
    ),
    "a method of an object": (
        "class C:\n    k = 1\n    def __call__(self, x): return self.g(x)\n    def g(self, x): return x\nf = C()",
        "class C:\n    k = 1\n    def __call__(self, x): return self.g(x)\n    def g(self, x): return -x\nf = C()",
    ),
    "a base of its class": (
        "class B:\n    def g(self, x): return x\nclass C(B):\n    def __call__(self, x): return self.g(x)\nf = C()",
        "class B:\n    def g(self, x): return -x\nclass C(B):\n    def __call__(self, x): return self.g(x)\nf = C()",
    ),
    "a bound method": (
        "class C:\n    def __init__(self, k): self.k = k\n    def g(self, x): return x * self.k\nf = C(1).g",
        "class C:\n    def __init__(self, k): self.k = k\n    def g(self, x): return x * self.k\nf = C(2).g",
    ),
    "a static method": (
        "class C:\n    @staticmethod\n    def g(x): return x\ndef f(x): return C.g(x)",
        "class C:\n    @staticmethod\n    def g(x): return -x\ndef f(x): return C.g(x)",
    ),
    "a property": (
        "class C:\n    @property\n    def k(self): return 1\nc = C()\ndef f(x): return c.k",
        "class C:\n    @property\n    def k(self): return 2\nc = C()\ndef f(x): return c.k",
    ),
    "one of two that call each other": (
        "def g(n): return n and f(n - 1)\ndef f(n): return n and g(n - 1)",
        "def g(n): return n and f(n - 2)\ndef f(n): return n and g(n - 1)",
    ),
    "a module of torch": (
        "p = torch.nn.Linear(2, 1)\ntorch.nn.init.ones_(p.weight)\ntorch.nn.init.ones_(p.bias)\ndef f(x): return p(x)",
        "p = torch.nn.Linear(2, 1)\ntorch.nn.init.ones_(p.weight)\ntorch.nn.init.zeros_(p.bias)\ndef f(x): return p(x)",
    ),
    "a module's hook": (
        "p = torch.nn.Identity()\np.register_forward_hook(lambda m, a, x: x)\ndef f(x): return p(x)",
        "p = torch.nn.Identity()\np.register_forward_hook(lambda m, a, x: -x)\ndef f(x): return p(x)",
    ),
    "a generator's state": (
        "g = torch.Generator().manual_seed(0)\ndef f(x): return torch.rand(1, generator=g)",
        "g = torch.Generator().manual_seed(1)\ndef f(x): return torch.rand(1, generator=g)",
    ),
    "an exception that is caught": (
        "def f(x):\n    try:\n        return x.a\n    except AttributeError:\n        return 0",
        "def f(x):\n    try:\n        return x.a\n    except (AttributeError, ValueError):\n        return 0",
    ),
}


@pytest.mark.parametrize("what", SAME)
def test_what_changes_nothing_is_the_same(what):
    one, other = map(notebook, SAME[what])
    assert HEX.fullmatch(hash_code(one))
    assert hash_code(one) == hash_code(other)


@pytest.mark.parametrize("what", OTHER)
def test_what_is_defined_again_is_the_same_and_with_another_part_another(what):
    one, again, other = (notebook(text) for text in (OTHER[what][0], *OTHER[what]))
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
    "a module whole": (
        "def f(x): return getattr(mine, x)",
        {"mine": own_module("a = 1")},
        "takes the module of_my_own",
    ),
    "its own import": ("def f(x):\n    import not_installed\n    return x", {}, "imports the module not_installed"),
    "a helper's": ("def g(x): return log\ndef f(x): return g(x)", {"log": sys.stdout}, r"f\.g\.log holds a "),
    "an attribute's": (
        "class C:\n    def __call__(self, x): return x\nf = C()\nf.log = log",
        {"log": sys.stdout},
        "log holds a ",
    ),
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
    found = [notebook(text) for of in (SAME, OTHER) for pair in of.values() for text in pair]
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
