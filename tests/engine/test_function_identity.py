"""Identity of a function of the user's in a run."""

import inspect

from sink_lens.edits.constructors import zero
from sink_lens.edits.metrics import loss
from sink_lens.engine.function_identity import function_hash


def test_the_source_of_a_function_counts_unless_it_is_the_librarys(monkeypatch):
    def own(x):
        return x

    things = loss(), zero("z", layers=[1]), own
    before = list(map(function_hash, things))
    monkeypatch.setattr(inspect, "getsource", lambda thing: "formatted otherwise")
    after = list(map(function_hash, things))
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, True, False]
    assert function_hash(zero("z", layers=[2])) != before[1]
