"""Every architecture that both libraries have is a row, or is refused with its reason."""

from tools import architectures


def test_each_has_a_row_or_a_reason_and_not_both():
    states = {name: architectures.state_of(name) for name in architectures.in_both()}
    assert [name for name, state in states.items() if state == architectures.NOT_LOOKED_AT] == []
    assert sum(state == "full" for state in states.values()) >= 48
    assert sum(state.startswith("hybrid") for state in states.values()) == 10
    assert architectures.FAMILIES.keys().isdisjoint(architectures.LEFT_OUT)
    assert "56 full" in architectures.table()
