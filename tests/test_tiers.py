"""What the first tier of tests leaves to the second."""

from types import SimpleNamespace

import tiers

from sink_lens.models.tiny import HYBRID_FAMILIES, LATENT_FAMILIES, MORE_FAMILIES, TINY_FAMILIES


class Item(SimpleNamespace):
    """As much of a collected test as the marking asks."""

    def __init__(self, test, *own, **params):
        super().__init__(nodeid=f"{test}[{params}]", own=[*own], callspec=SimpleNamespace(params=params))

    def get_closest_marker(self, name):
        return name if name in self.own else None

    def add_marker(self, mark):
        self.own.append(mark.name)


def left(*items):
    """The families, or other values, that the second tier is left."""
    tiers.mark(items)
    return [next(iter(item.callspec.params.values())) for item in items if "exhaustive" in item.own]


def test_a_family_that_is_no_representative_is_left_and_nothing_else():
    assert tiers.REPRESENTATIVES.keys() <= {*TINY_FAMILIES, *MORE_FAMILIES, *LATENT_FAMILIES, *HYBRID_FAMILIES}
    assert left(*(Item("test_a", family=one, site="z") for one in ("opt", "llama", "phi", "bloom"))) == ["opt", "phi"]
    asked = [Item("test_a", family=one, site=site) for site in ("z", "k") for one in ("mixtral", "olmoe")]
    assert left(*asked, Item("test_b", family="olmoe")) == ["olmoe", "olmoe"]
    assert (
        left(Item("test_a", "every_family", family="opt"), Item("test_b", name="opt"), Item("test_c", family=3)) == []
    )


def test_the_first_values_stay_and_a_tuple_is_one_value_of_several_parameters():
    first, second = tiers.first([(1, 2), (3, 4)])
    assert first == (1, 2)
    assert (second.values, [one.name for one in second.marks]) == ((3, 4), ["exhaustive"])
    assert [one for one in tiers.first("abc", stay=lambda value: value > "a") if isinstance(one, str)] == ["b", "c"]
