"""A seventh link, as anybody would add one: one file."""

import numpy as np

from sink_lens.chain.evidence import Evidence, Statistic
from sink_lens.chain.links.link import Freeze, Intervention, Link, Trial
from sink_lens.edits.constructors import zero


def _statistics(evidence: Evidence, rng: np.random.Generator) -> list[Statistic]:
    """Give the sink's mass, mean over layers and heads."""
    panel = evidence.panel
    mass = panel.at_sink("sink_mass", panel.location.sink_position).nanmean(dim=(0, 2))
    return [Statistic(name="toy_mass", interval=evidence.interval(mass, generator=rng))]


def _interventions(trial: Trial) -> list[Intervention]:
    """Zero what the first layer's MLP writes at the sink."""
    setting, position = trial.setting, trial.setting.sink_position
    edits = (zero("mlp_out", layers=[0], positions=[position]),)
    return [
        Intervention(
            name="toy x 0", edits=edits, position=position, reads=setting.layers_after_growth
        )
    ]


TOY_LINK = Link(
    name="sink_toy",
    source="attention sink",
    target="toy node",
    arrow="sink → toy",
    sentence="The sink moves the toy.",
    question="does the toy move?",
    statistics=_statistics,
    floor=lambda config, length, position: 0.0,
    interventions=_interventions,
    freeze=Freeze(
        name="toy",
        make=lambda setting, segment, position, generator: setting.freeze_site(
            "mlp_out", layers=segment.layers, position=position
        ),
    ),
)
