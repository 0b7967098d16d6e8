"""Scores of edges: equal to autograd through readers that are written out, to TransformerLens, to real patches."""

import numpy as np
import pytest
import torch
from lenses import lens_of
from transformer_lens.tools.analysis import attribution_patching as reference

from analyses.zoo.mechanisms import wire
from sink_lens.circuits import rules
from sink_lens.circuits.ablated import circuit_values
from sink_lens.circuits.circuit import find
from sink_lens.circuits.exact import exact_node_scores, exact_scores
from sink_lens.circuits.graph import Graph
from sink_lens.circuits.runs import Runs
from sink_lens.circuits.scores import Gradients, score
from sink_lens.edits import metrics
from sink_lens.errors import InputError, ModelError
from sink_lens.models.load import wrap
from sink_lens.models.sites import SITES, bridge_hook, read_site
from sink_lens.models.tiny import HYBRID_FAMILIES, MORE_FAMILIES, TINY_FAMILIES, tiny

EXPERTS = ("gpt_oss", "mixtral", "qwen3_moe", "olmoe")
DENSE = [family for family in (*TINY_FAMILIES, *MORE_FAMILIES) if family not in EXPERTS]
SINGLE = ("gptj",)  # computes its attention in float32, whatever the weights are
METRIC = metrics.logit_difference([5, 6, 9], [7, 8, 10])


def pair(*, n=3, length=11, at=3):
    clean = torch.randint(3, 300, (n, length), generator=torch.Generator().manual_seed(0))
    corrupted = clean.clone()
    corrupted[:, at] = 3 + (clean[:, at] + 50) % 297
    return clean, corrupted


def exact_lens(family):
    model = tiny(family)
    return wrap(model if family in SINGLE else model.double())


def runs_of(lens, *, neurons=None, metric=METRIC, **more):
    graph = Graph.of(lens, neurons=neurons, spans=more.pop("spans", ("",)))
    clean, corrupted = pair()
    return Runs.of(lens, clean, corrupted, graph=graph, metric=metric, **more)


class WrittenOut:
    """One run in which every reader has a stream of its own, made by the plain model's own norms and projections."""

    def __init__(self, lens, tokens):
        self.lens, self.zeros, self.kept = lens, {}, {}
        hooks = []
        for layer in range(lens.n_layers):
            for site in ("resid_pre", "attn_out", "resid_post", "z", "mlp_out"):
                hooks.append((self.hook(site, layer), self.keeper(site, layer)))
            for kind in ("q", "k", "v"):
                hooks.append((self.hook(kind, layer), self.projector(kind, layer)))
            hooks.append((self.hook("mlp_in", layer), self.mlp_reader(layer)))
            if hasattr(self.attention(layer), "head_gate"):
                hooks.append((f"blocks.{layer}.attn.head_gate.hook_out", self.gate_reader(layer)))
        hooks.append((self.hook("final", 0), self.last_reader()))
        self.logits = lens.bridge.run_with_hooks(tokens, fwd_hooks=hooks, use_cache=False)

    def hook(self, site, layer):
        return bridge_hook(SITES[site], family=self.lens.family, layer=layer)

    def attention(self, layer):
        return self.lens.layer(layer).get_submodule(self.lens.family.attention)

    def keeper(self, site, layer):
        def keep(x, hook):
            self.kept[site, layer] = x

        return keep

    def own_stream(self, name, x):
        self.zeros[name] = torch.zeros_like(x, requires_grad=True)
        return x + self.zeros[name]

    def norm(self, layer, path):
        return (lambda x: x) if path is None else self.lens.layer(layer).get_submodule(path)

    def projector(self, kind, layer):
        family = self.lens.family
        address = SITES[kind].address(family)
        sizes = {"n_heads": self.lens.n_heads, "n_kv_heads": self.lens.n_kv_heads, "d_head": self.lens.d_head}

        def project(x, hook):
            heads = []
            for head in range(x.shape[2]):
                stream = self.own_stream(f"a{layer}.{head}<{kind}>", self.kept["resid_pre", layer])
                out = self.lens.layer(layer).get_submodule(address.module)(self.norm(layer, family.attn_norm)(stream))
                heads.append(read_site(out, address=address, family=family, batch=len(x), **sizes)[:, :, head])
            new = torch.stack(heads, 2)
            torch.testing.assert_close(new, x, atol=1e-5, rtol=1e-5)
            return new

        return project

    def gate_reader(self, layer):
        def project(x, hook):
            parts = x.unflatten(-1, (self.lens.n_heads, -1)).shape[-1]
            heads = []
            for head in range(self.lens.n_heads):
                stream = self.own_stream(f"a{layer}.{head}<g>", self.kept["resid_pre", layer])
                out = self.attention(layer).head_gate(self.norm(layer, self.lens.family.attn_norm)(stream))
                heads.append(out[..., head * parts : (head + 1) * parts])
            return torch.cat(heads, -1)

        return project

    def mlp_reader(self, layer):
        config, family = self.lens.config, self.lens.family
        parallel = getattr(config, "use_parallel_residual", False) or family.architecture in (
            "CohereForCausalLM",
            "Cohere2ForCausalLM",
            "PhiForCausalLM",
            "FalconForCausalLM",
            "GPTJForCausalLM",
        )

        def reader(x, hook):
            stream = self.kept["resid_pre", layer] + (0 if parallel else self.kept["attn_out", layer])
            new = self.norm(layer, family.mlp_norm)(self.own_stream(f"m{layer}", stream)).reshape(x.shape)
            torch.testing.assert_close(new, x, atol=1e-5, rtol=1e-5)
            return new

        return reader

    def last_reader(self):
        def reader(x, hook):
            stream = self.own_stream("logits", self.kept["resid_post", self.lens.n_layers - 1])
            return self.lens.plain.get_submodule(self.lens.family.final_norm)(stream)

        return reader

    def written(self):
        """What every writer adds: a head's part goes through the output projection alone."""
        found = [self.kept["resid_pre", 0]]
        for layer in range(self.lens.n_layers):
            z, o = self.kept["z", layer], self.attention(layer).get_submodule(self.lens.family.o)
            nothing = o(torch.zeros_like(z).flatten(2))
            total = o(z.flatten(2))
            factor = self.kept["attn_out", layer] / total  # a norm or a multiplier behind it, element by element
            for head in range(self.lens.n_heads):
                alone = torch.zeros_like(z)
                alone[:, :, head] = z[:, :, head]
                found.append((o(alone.flatten(2)) - nothing) * factor)
            found.append(self.kept["mlp_out", layer])
        return [one.detach() for one in found]


class HeldNorms(WrittenOut):
    """The same with norms whose divisor is a constant of the backward pass."""

    def norm(self, layer, path):
        return self.held(super().norm(layer, path))

    def last_reader(self):
        def reader(x, hook):
            stream = self.own_stream("logits", self.kept["resid_post", self.lens.n_layers - 1])
            return self.held(self.lens.plain.get_submodule(self.lens.family.final_norm))(stream)

        return reader

    def held(self, module):
        def norm(x):
            off, gain = module(torch.zeros_like(x)).detach(), module.weight.detach() + self.lens.family.gain_offset
            c = gain * (x - x.mean(-1, keepdim=True) if self.lens.family.centred_norm else x)
            size = (module(x) - off).detach().norm(dim=-1, keepdim=True) / c.detach().norm(dim=-1, keepdim=True)
            return c * size + off

        return norm


def written_out(lens, names, made=WrittenOut):
    """EAP's score of every edge by pair: the readers one by one, by autograd."""
    clean, corrupted = pair()
    run = made(lens, clean)
    rows = torch.arange(len(clean))
    value = (run.logits[rows, -1, [5, 6, 9]] - run.logits[rows, -1, [7, 8, 10]]).sum()
    gradients = dict(zip(run.zeros, torch.autograd.grad(value, list(run.zeros.values())), strict=True))
    differences = [a - b for a, b in zip(run.written(), WrittenOut(lens, corrupted).written(), strict=True)]
    writers = ["input"]
    for layer in range(lens.n_layers):
        writers += [*(f"a{layer}.h{head}" for head in range(lens.n_heads)), f"m{layer}"]
    found = []
    for name in names:
        writer, reader = name.split("->")
        reader = reader.replace(".h", ".").replace(".kv", ".")
        found.append((differences[writers.index(writer)] * gradients[reader]).sum((1, 2)))
    return torch.stack(found, 1)


@pytest.mark.parametrize("family", DENSE)
def test_scores_equal_autograd_through_readers_written_out_one_by_one(family):
    lens = exact_lens(family)
    runs = runs_of(lens)
    found = score(runs, method="eap").values
    expected = written_out(lens, runs.graph.names).numpy()
    scale = np.abs(expected).max()
    assert scale > 0, family
    allowed = 2e-5 if family in SINGLE else 1e-6
    assert np.abs(found - expected).max() < allowed * scale, (family, np.abs(found - expected).max() / scale)


@pytest.mark.parametrize("family", DENSE)
def test_rules_for_the_backward_pass_know_the_norms_of_every_family(family):
    score(runs_of(exact_lens(family)), method="gim")  # refuses where a norm is not found


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3", "gpt_neox"])
def test_rules_for_the_backward_pass_equal_autograd_with_norms_held(family, monkeypatch):
    monkeypatch.setattr(rules, "TEMPERATURE", 1.0)
    lens = exact_lens(family)
    found = score(runs_of(lens), method="gim")
    theirs = written_out(lens, found.graph.names, made=HeldNorms).float().detach().numpy()
    off = np.abs(found.values - theirs).max()
    assert off < 5e-6 * np.abs(theirs).max()  # the model's own norms round to float32
    assert np.abs(found.values - score(runs_of(lens), method="eap").values).max() > 0.01 * np.abs(theirs).max()


@pytest.mark.parametrize(("name", "ablation", "method"), [("redundant", "resample", "eap"), ("copy", "zero", "eap-ig")])
def test_rules_see_edges_that_a_saturated_softmax_and_norms_hide(name, ablation, method):
    mechanism = wire(name, seed=20, family="llama")
    clean, corrupted, metric = mechanism.pairs(6, generator=torch.Generator().manual_seed(0))
    lens = wrap(mechanism.model)
    runs = Runs.of(lens, clean, corrupted, graph=Graph.of(lens), metric=metric, ablation=ablation)
    names = runs.graph.names
    needed = np.isin(names, list(mechanism.needed(ablation)))
    judged = ~np.isin(names, list(mechanism.unjudged(ablation, names)))

    def share_found(method):
        size = np.where(judged, np.abs(score(runs, method=method, most_steps=10).mean), -1)
        return needed[np.argsort(-size)[: needed.sum()]].mean()

    assert share_found("gim") >= 0.8
    assert share_found(method) <= share_found("gim") - 0.25


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "phi3", "granite"])
def test_neurons_of_their_own_split_the_mlps_edges_and_change_no_other(family):
    lens = exact_lens(family)
    whole, split = (score(runs_of(lens, neurons=one), method="eap") for one in (None, {1: [3, 5, 9]}))
    own = {name: split.values[:, at] for name, at in split.graph.index.items()}
    scale = np.abs(whole.values).max()
    for name, at in whole.graph.index.items():
        writer, reader = name.split("->")
        writers = ["m1", "m1.n"] if writer == "m1" else [writer]
        readers = ["m1", "m1.n"] if reader == "m1" else [reader]
        total = sum(own[f"{one}->{other}"] for one in writers for other in readers)
        assert np.abs(total - whole.values[:, at]).max() < 1e-6 * scale, (family, name)


@pytest.mark.parametrize("family", DENSE)
def test_a_circuit_of_all_edges_is_the_clean_run_and_one_edge_less_is_its_exact_patch(family):
    lens = exact_lens(family)
    runs = runs_of(lens, neurons={1: [3, 5, 9]})
    n = runs.graph.n_edges
    edges = [edge for edge in range(5, n, n // 6) if "<g>" not in runs.graph.names[edge]]
    kept = np.ones((2 + len(edges), n), dtype=bool)
    kept[0] = False
    kept[np.arange(2, len(kept)), edges] = False
    values = circuit_values(runs, kept)
    found = (values[1] - values[2:]).T.numpy()
    assert (values[0] - runs.corrupted_values).abs().max() < 2e-6, family
    assert (values[1] - runs.clean_values).abs().max() < 4e-6, family
    exact = exact_scores(runs, edges)
    assert np.abs(exact).max() > 1e-3
    assert np.abs(found - exact).max() < 6e-6, family


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "granite", "gpt_neox", "headnorm"])
def test_a_node_that_is_patched_whole_is_a_circuit_without_its_edges(family):
    runs = runs_of(exact_lens(family), neurons={1: [3, 5, 9]})
    graph = runs.graph
    nodes = range(0, len(graph.writers), 4)
    kept = np.stack([graph.ends[1] != node for node in nodes])
    expected = (runs.clean_values - circuit_values(runs, kept)).T.numpy()
    found = exact_node_scores(runs)[:, nodes]
    assert np.abs(found).max() > 1e-3
    assert np.abs(found - expected).max() < 6e-6, family


def test_a_real_patch_of_a_node_shows_what_cancels_before_a_threshold():
    for name, ablation in (("hidden", "resample"), ("hidden", "mean_ordinary"), ("cancellation", "resample")):
        mechanism = wire(name, seed=20, family="llama")
        clean, corrupted, metric = mechanism.pairs(4, generator=torch.Generator().manual_seed(0))
        lens = wrap(mechanism.model)
        found = find(lens, clean, corrupted, metric=metric, ablation=ablation, edges=10, most_steps=5)
        nodes = found.check_nodes()
        cancels = {edge.partition("->")[0] for edge in mechanism.edges if edge.endswith("->m1")} - {"input"}
        assert len(cancels) == (2 if name == "hidden" else 0)
        assert set(nodes["node"][nodes["unseen"]]) == cancels
        assert (nodes["magnitude"] >= nodes["score"].abs() - 1e-6).all()


def test_an_exact_edge_equals_path_patching_by_hand():
    lens = lens_of("llama")  # two heads share a key
    runs = runs_of(lens)
    tokens, corrupted = pair()
    model, layer = lens.plain, 2
    z, x = [], []
    handles = [
        lens.layer(0).self_attn.o_proj.register_forward_pre_hook(lambda module, given: z.append(given[0])),
        lens.layer(layer).register_forward_pre_hook(lambda module, given: x.append(given[0])),
    ]
    with torch.no_grad():
        clean_logits = model(tokens).logits
        model(corrupted)
        for handle in handles:
            handle.remove()
        apart = (z[0] - z[1]).clone()
        apart[..., :12] = 0.0
        apart[..., 24:] = 0.0  # head 1 alone
        stream = x[0] - lens.layer(0).self_attn.o_proj(apart)
        block = lens.layer(layer)
        key = block.self_attn.k_proj(block.input_layernorm(stream))

        def put(module, given, out):
            out = out.clone()
            out[..., 12:] = key[..., 12:]  # the second key-value head
            return out

        handle = block.self_attn.k_proj.register_forward_hook(put)
        logits = model(tokens).logits
        handle.remove()
    rows = torch.arange(3)
    values = [one[rows, -1, [5, 6, 9]] - one[rows, -1, [7, 8, 10]] for one in (clean_logits, logits)]
    found = exact_scores(runs, [runs.graph.index["a0.h1->a2.kv1<k>"]])[:, 0]
    assert found == pytest.approx((values[0] - values[1]).numpy(), abs=3e-5)
    assert np.abs(found).max() > 1e-3


def test_scores_equal_transformer_lens_on_gpt2():
    lens = lens_of("gpt2")
    clean, corrupted = pair()
    runs = runs_of(lens)
    found = score(runs, method="eap-corrupted")
    total = np.zeros(runs.graph.n_edges)
    for row, (right, wrong) in enumerate(zip([5, 6, 9], [7, 8, 10], strict=True)):
        one = reference.attribution_patch(
            lens.bridge,
            clean[row : row + 1],
            corrupted[row : row + 1],
            lambda logits, right=right, wrong=wrong: logits[0, -1, right] - logits[0, -1, wrong],
            reference.EdgeAttributionConfig(granularity="edge"),
        )
        for (writer, reader), value in one.edge_scores.items():
            total[found.graph.index[f"{theirs(writer)}->{theirs(reader)}"]] += value / 3
    assert np.abs(found.mean - total).max() < 1e-5 * np.abs(total).max()


def theirs(node):
    letter = {"q_input": "<q>", "k_input": "<k>", "v_input": "<v>"}.get(node.kind, "")
    if node.head is not None:
        return f"a{node.layer}.h{node.head}{letter}"
    return {"embed": "input", "logits": "logits"}.get(node.kind, f"m{node.layer}")


def test_edges_out_of_the_input_sum_to_the_difference_of_the_metric():
    lens = lens_of("llama")
    for ablation in ("resample", "mean_ordinary", "mean_all", "mean_aligned"):
        found = score(runs_of(lens, ablation=ablation), steps=5)
        assert found.completeness["error"].abs().max() < 0.01, ablation
        assert found.complete == pytest.approx(1, abs=0.01)
        assert found.steps.max() > 5
    few = score(runs_of(lens), steps=1, most_steps=1)
    assert few.completeness["error"].abs().max() > 0.05


def test_gradients_along_one_sublayer_equal_a_sum_over_runs_by_hand():
    lens = lens_of("gemma2")
    runs = runs_of(lens)
    found = score(runs, method="eap-ig-activations", steps=2)
    begin, rows = runs.begin(slice(0, 3)), slice(0, 3)
    clean, _ = runs.writings(rows, begin=begin)
    replaced, _ = runs.writings(rows, corrupted=True, begin=begin)
    at = [index for index, writer in enumerate(runs.graph.writers) if writer.layer == 0 and writer.kind == "head"]
    total = (clean - replaced)[:, at].sum(1)
    gradients = Gradients(runs, clean - replaced, begin=begin)
    for point in (0.25, 0.75):

        def put(x, hook, point=point):
            return torch.cat([x[:, :begin], x[:, begin:] - (1 - point) * total], 1)

        gradients.add([("blocks.0.hook_attn_out", put)], weight=0.5)
    expected = gradients.contracted().numpy()
    own = np.isin(runs.graph.ends[1], at)
    assert np.abs(found.values[:, own] - expected[:, own]).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(expected[:, own]).max() > 1e-3


def test_spans_share_the_score_of_an_edge():
    lens = lens_of("llama")
    masks = torch.zeros(2, 3, 11, dtype=torch.bool)
    masks[0, :, :6], masks[1, :, 6:] = True, True
    whole, apart = (
        score(runs_of(lens), method="eap"),
        score(runs_of(lens, spans=("early", "late"), masks=masks), method="eap"),
    )
    by_span = apart.graph.matrix(apart.mean)
    assert by_span.sum(0) == pytest.approx(whole.graph.matrix(whole.mean)[0], abs=1e-5)
    assert np.abs(by_span).max(axis=(1, 2)).min() > 1e-3
    assert "a0.h1->m2@late" in apart.graph.index
    runs = runs_of(lens, spans=("early", "late"), masks=masks)
    kept = np.ones((1, runs.graph.n_edges), dtype=bool)
    assert (circuit_values(runs, kept)[0] - runs.clean_values).abs().max() < 1e-4


def test_sink_mass_is_explained_by_queries_and_keys_up_to_its_layer():
    lens = lens_of("llama")
    runs = runs_of(lens, metric=metrics.sink_mass(0, layers=[1]))
    found = score(runs, steps=20)
    assert found.complete == pytest.approx(1, abs=0.01)
    names = runs.graph.names[np.abs(found.values).max(0) > 1e-6]
    assert len(names)
    assert not any("a2." in name.split("->")[1] or "logits" in name or "a1.kv0<v>" in name for name in names)
    runs = runs_of(lens, metric=metrics.sink_mass(0, layers=[1]), ablation="mean_ordinary")
    kept = np.ones((1, runs.graph.n_edges), dtype=bool)
    assert (circuit_values(runs, kept)[0] - runs.clean_values).abs().max() < 1e-5


def test_what_has_no_circuit_is_refused():
    for family in EXPERTS[:2]:
        with pytest.raises(ModelError, match="mixture of experts"):
            Graph.of(lens_of(family))
    with pytest.raises(ModelError, match="no attention"):
        Graph.of(lens_of(HYBRID_FAMILIES[0]))
    lens = lens_of("llama")
    clean, _ = pair()
    with pytest.raises(InputError, match="corrupted"):
        Runs.of(lens, clean, None, graph=Graph.of(lens), metric=METRIC)
    with pytest.raises(InputError, match="reads the residual stream"):
        runs_of(lens, metric=metrics.norm(0, layer=1))
    with pytest.raises(InputError, match="neurons"):
        Graph.of(lens, neurons={1: [80]})
    with pytest.raises(ModelError, match="something else reads the stream"):
        of_stream = {"name": "size", "function": lambda run: run.state_at(5)[1].square().sum(-1), "positions": (5,)}
        score(runs_of(lens, metric=metrics.Metric(**of_stream, logits=True)), method="eap")
