"""Random changes of a model with a lens on it: every door gives a fresh wrap's numbers, or refuses."""

import pytest
from changed_models import FAMILIES, RULES, World
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test


class Changes(RuleBasedStateMachine):
    """One model, and a rule for each way to change it; patch and sweep, which take longest, are asked in turns."""

    @initialize(family=st.sampled_from(FAMILIES), seed=st.integers(0, 999))
    def begin(self, family, seed):
        self.world = World(family, seed=seed, every_door=False)


def _rule(name):
    """A rule of the machine."""

    def change(self):
        self.world.step(name)

    change.__name__ = name
    return rule()(change)


for _name in RULES:
    setattr(Changes, _name, _rule(_name))


@pytest.mark.parametrize("name", RULES)
def test_no_door_is_silently_wrong_after_one_change(name):
    """What takes an adapter or a hook away, or needs gradients, follows what puts it there."""
    world = World("llama", seed=0)
    if world.step(name) == "left out":
        world.step("add_hook" if name == "remove_hook" else "add_adapter")
        assert world.step(name) != "left out"


@pytest.mark.exhaustive
def test_no_door_is_silently_wrong_after_300_changes():
    run_state_machine_as_test(
        Changes,
        settings=settings(
            max_examples=6, stateful_step_count=50, derandomize=True, deadline=None, database=None,
            phases=[Phase.generate], suppress_health_check=list(HealthCheck),
        ),
    )  # fmt: skip
