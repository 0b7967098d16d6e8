"""The faults that are planted: each is one change, and the same seed plants the same."""

import ast

import pytest

from tools.faults import changes_of, draw, interval

SOURCE = """
def f(x, low=1):
    if low <= 0 and x.ok:
        raise ValueError(f"{low - 1}")
    return -x.sum(-1) + g(x[:, 1:], dim=0, scale=2 * low)
"""


def test_every_change_is_made_once_and_texts_of_errors_are_left_alone():
    found = []
    for at in range(len(changes_of(ast.parse(SOURCE).body[0]))):
        tree = ast.parse(SOURCE)
        kind, _, act = changes_of(tree.body[0])[at]
        act()
        condition, _, value = ast.unparse(tree).splitlines()[1:]
        found.append((kind, condition.strip()[3:-1], value.strip()[7:]))
    was = ("low <= 0 and x.ok", "-x.sum(-1) + g(x[:, 1:], dim=0, scale=2 * low)")
    assert [
        (kind, *(new for new, old in zip(both, was, strict=True) if new != old))
        for kind, *both in found
    ] == [
        ("and, or", "low <= 0 or x.ok"),
        ("comparison", "low < 0 and x.ok"),
        ("off by one", "low <= 1 and x.ok"),
        ("sign", "-x.sum(-1) - g(x[:, 1:], dim=0, scale=2 * low)"),
        ("sign", "+x.sum(-1) + g(x[:, 1:], dim=0, scale=2 * low)"),
        ("axis", "-x.sum(-2) + g(x[:, 1:], dim=0, scale=2 * low)"),
        ("axis", "-x.sum(-1) + g(x[:, 1:], dim=1, scale=2 * low)"),
        ("argument", "-x.sum(-1) + g(x[:, 1:], dim=0)"),
        ("off by one", "-x.sum(-1) + g(x[:, 2:], dim=0, scale=2 * low)"),
        ("product", "-x.sum(-1) + g(x[:, 1:], dim=0, scale=2 / low)"),
        ("off by one", "-x.sum(-1) + g(x[:, 1:], dim=0, scale=3 * low)"),
    ]


@pytest.mark.exhaustive
def test_a_seed_draws_the_same_faults_in_every_room():
    faults = draw(3, 20)
    assert faults == draw(3, 20)
    assert faults != draw(4, 20)
    assert len({fault.room for fault in faults}) > 15
    assert len({(fault.file, fault.function) for fault in faults}) == 20


def test_the_interval_is_wilsons():
    # 8 of 10: centre (0.8 + 0.19207) / 1.38415, half 1.96 sqrt(0.016 + 0.009604) / 1.38415
    assert interval(8, 10) == pytest.approx((0.4901, 0.9434), abs=1e-3)
