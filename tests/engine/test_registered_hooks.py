"""Every reading and edit is a registered hook: where nothing is registered, nothing is read and nothing changes."""

from collections import OrderedDict

import pytest
import torch
from lenses import lens_of
from torch.utils.hooks import RemovableHandle
from transformer_lens.hook_points import HookPoint, LensHandle

from sink_lens.activations.record import Reading, capture, stream
from sink_lens.activations.sink_mask import sink_scores
from sink_lens.data.tokens import TokenBatch
from sink_lens.edits.constructors import scale, zero
from sink_lens.edits.hooks import from_hook
from sink_lens.edits.metrics import Metric, logit_difference
from sink_lens.engine.cells import cell_of_edits
from sink_lens.engine.engine import Engine
from sink_lens.engine.forward import run_with
from sink_lens.engine.plan import Plan
from sink_lens.errors import InputError, SinkLensError, SiteError
from sink_lens.models.sites import SITES, bridge_hook_name, sites_of
from tests.tiny_families import TINY_FAMILIES

LENGTH = 12
PLAN = Plan(path="blocks", prompts=2, pack=3)


def batch_of():
    return TokenBatch.from_tensor(
        torch.randint(3, 300, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    )


def forget(monkeypatch, *, but=()):
    """Hook points take functions and forget them, but those with these names."""
    register = HookPoint.add_hook

    def add_hook(self, hook, **options):
        if str(self.name).endswith(tuple(but)):
            return register(self, hook, **options)
        handle = LensHandle(RemovableHandle(OrderedDict()))
        self.fwd_hooks.append(handle)
        return handle

    monkeypatch.setattr(HookPoint, "add_hook", add_hook)


def engine_of(lens, edits, metric):
    cells = [cell_of_edits(one) for one in edits]
    return Engine(lens, batch_of(), cells, [metric], plan=PLAN)


def test_without_registration_nothing_is_read(monkeypatch):
    lens, batch = lens_of("llama"), batch_of()  # before: wrapping a model tries its hooks
    forget(monkeypatch)
    read = Reading(
        name="norm", sites=("resid_post",), function=lambda view: view["resid_post"].norm(dim=-1)
    )
    for act in (
        lambda: stream(lens, batch, [read]),
        lambda: capture(lens, batch, sites=["z"]),
        lambda: capture(lens, batch, sites=["pattern"], path="bridge"),
    ):
        with pytest.raises(SiteError, match="did not fire in layer 0"):
            act()
    found = {}
    with torch.no_grad():
        lens.bridge.run_with_hooks(batch.tokens, fwd_hooks=read.fwd_hooks(lens, into=found))
    assert found == {}
    with pytest.raises((SinkLensError, AssertionError)):
        sink_scores(lens, batch, by="norm")
    with pytest.raises((SinkLensError, KeyError)):
        run_with(lens, batch, sites=("z",))
    mass = Metric(name="mass", function=lambda run: run.mass_at(0))
    with pytest.raises((SinkLensError, KeyError)):
        engine_of(lens, [zero("z", layers=[1])], mass).baseline_metrics()


def test_without_registration_no_edit_changes_anything(monkeypatch):
    lens, read = lens_of("llama"), ("hook_pattern", "blocks.2.hook_out")
    sites = [one for one in sites_of(lens.family) if SITES[one].per_layer and one != "pattern"]
    edits = [scale(site, 0.5, layers=[1], positions=[2]) for site in sites]

    def changes():
        made = engine_of(lens, edits, logit_difference(5, 6))
        frames = [made.run(block) for block in made.blocks]
        return [bool(one) for frame in frames for one in frame["changed"] & frame["error"].isna()]

    assert all(changes())
    forget(monkeypatch, but=read)
    assert not any(changes())


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_a_cell_shows_each_hook_function_its_own_batch_at_every_site_of_every_family(family):
    """Several cells share a forward; each function sees one cell's sequences and positions."""
    lens, seen = lens_of(family), {}
    sites = [one for one in sites_of(lens.family) if SITES[one].per_layer]

    def watch(name):
        def hook(x, hook):
            seen.setdefault(name, set()).add(
                tuple(x.shape[:2] if not SITES[name].observed else (x.shape[0], x.shape[2]))
            )
            return 0.5 * x if not SITES[name].observed else None

        return hook

    names = {site: bridge_hook_name(SITES[site], family=lens.family, layer=1) for site in sites}
    edits = [from_hook(names[site], watch(site), model=lens) for site in sites]
    made = engine_of(lens, edits, logit_difference(5, 6))
    for block in made.blocks:
        made.run(block)
    assert seen == {site: {(2, LENGTH)} for site in sites}
    for number in range(len(edits)):  # each comes close to the bridge alone
        assert made.deviations([number])[0][1] < 1e-4, sites[number]


def test_a_hook_that_stands_on_the_bridge_is_refused_where_cells_share_a_forward():
    lens = lens_of("llama")
    with (
        lens.bridge.hooks(fwd_hooks=[("blocks.1.hook_resid_post", lambda x, hook: 2 * x)]),
        pytest.raises(
            InputError, match=r"a hook stands on the bridge at blocks.1.hook_out, .*edits.from_hook"
        ),
    ):
        engine_of(lens, [zero("z", layers=[1])], logit_difference(5, 6))
    engine_of(lens, [zero("z", layers=[1])], logit_difference(5, 6))
