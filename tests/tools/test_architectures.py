"""Every architecture that both libraries have is a row, or is refused with its reason."""

from tools import architectures


def test_each_has_a_row_or_a_reason():
    states = {name: architectures.state_of(name) for name in architectures.in_both()}
    assert [name for name, state in states.items() if state == architectures.NOT_LOOKED_AT] == []
    assert sum(state == "full" for state in states.values()) >= 48
    assert sum(state.startswith("hybrid") for state in states.values()) == 10


def test_nothing_is_both_a_row_and_left_out():
    assert architectures.FAMILIES.keys().isdisjoint(architectures.LEFT_OUT)
    assert "56 full" in architectures.table()
