"""Models of the zoo measured and edited by hand, with the forward of transformers and torch hooks, nothing of ours.

A run is read at seven places of every layer; an edit changes one of them. Everything is averaged over sequences.
"""

import contextlib
from dataclasses import dataclass

import torch

EARLIEST = 8
"""First position that counts among the other tokens in comparisons."""
INTERIOR = 19
"""The position that is isolated."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What was read: the pattern [layer batch head query key] and, by (site, layer), [batch position width]."""

    pattern: torch.Tensor
    sites: dict
    logits: torch.Tensor


def blocks(model):
    for path in ("model.layers", "transformer.h", "gpt_neox.layers", "model.decoder.layers"):
        with contextlib.suppress(AttributeError):
            return model.get_submodule(path)
    raise AssertionError(type(model))


def place(model, site, layer):
    """The module of a site, None where the family has none, and whether it is its input."""
    if (site, layer) == ("stream", -1):
        return model.get_input_embeddings(), False
    block, none = blocks(model)[layer], torch.nn.Identity()  # a mixer in its place
    attentions = [name for name in ("self_attn", "attention", "attn") if hasattr(block, name)]
    attention = getattr(block, attentions[0]) if attentions else none
    outputs = [
        name for name in ("o_proj", "dense", "c_proj", "out_proj") if hasattr(attention, name)
    ]
    output = getattr(attention, outputs[0]) if outputs else None
    # olmo2 and gemma norm what is written.
    post_norm = hasattr(block, "post_feedforward_layernorm")
    down = down_of(block)
    if hasattr(
        attention, "kv_b_proj"
    ):  # the latent that all heads' keys are made from; their values are too
        keys = {"key_in": (attention.kv_a_proj_with_mqa, True)}
        keys |= dict.fromkeys(("k", "normed_k"), (attention.kv_a_layernorm, False))
        keys["q"] = (attention.q_proj or attention.q_b_proj, False)
    else:
        key = getattr(attention, "k_proj", None)
        normed = (
            getattr(attention, "k_norm", None) or getattr(attention, "k_layernorm", None) or key
        )
        keys = {"key_in": (key, True), "k": (key, False), "normed_k": (normed, False)}
        keys["q"] = (getattr(attention, "q_proj", None), False)
    found = {
        "z": (getattr(attention, "head_out", None) or output, True),
        "attn_out": (block.post_attention_layernorm if post_norm else output, False),
        "neurons": (down, True),
        "written": (down, False),
        "mlp_in": (getattr(block, "mlp", None), True),
        "stream": (block, False),
    }
    return (keys | found)[site]


def down_of(block):
    """The down-projection; None where neurons have no module, as in the experts of gpt_oss."""
    mlp = getattr(block, "mlp", None) or getattr(block, "feed_forward", None)
    down = (
        getattr(mlp, "down_proj", None) or getattr(mlp, "w2", None) or getattr(mlp, "c_proj", None)
    )
    return down if isinstance(down, torch.nn.Linear) else None


def expert_of(block, unit):
    """Return the module of a neuron's expert, the expert (None: the shared one) and the neuron's index in it.

    The neuron is counted over all experts.
    """
    experts = block.mlp.experts
    width = experts.down_proj.shape[-1]
    if unit < width * experts.num_experts:
        return experts, unit // width, unit % width
    return block.mlp.shared_expert, None, unit - width * experts.num_experts


def column_of(block, unit):
    """The parameter with the output weights of a neuron, and the index of its column."""
    if (down := down_of(block)) is not None:
        return down.weight, (slice(None), unit)
    module, expert, index = expert_of(block, unit)
    if expert is None:
        return module.down_proj.weight, (slice(None), index)
    return module.down_proj, (expert, slice(None), index)


@torch.no_grad()
def activity(block, x, unit):
    """Return the factor on the output weights of an expert's neuron, with the router's weight or the gate's."""
    module, expert, index = expert_of(block, unit)
    if expert is None:
        neurons = module.act_fn(module.gate_proj(x)) * module.up_proj(x)
        return neurons[..., index] * torch.sigmoid(block.mlp.shared_expert_gate(x))[..., 0]
    _, weights, chosen = block.mlp.gate(x.flatten(0, 1))
    weight = (weights * (chosen == expert)).sum(-1).view(x.shape[:-1])
    gate, up = (x @ part.T for part in module.gate_up_proj[expert].chunk(2))
    return (module.act_fn(gate) * up)[..., index] * weight


SITES = ("z", "attn_out", "neurons", "written", "mlp_in", "stream", "key_in", "k", "q", "normed_k")


def hook(module, is_input, function):
    if is_input:
        return module.register_forward_pre_hook(lambda _, given: (function(given[0]), *given[1:]))

    def after(_, __, out):
        return (function(out[0]), *out[1:]) if isinstance(out, tuple) else function(out)

    return module.register_forward_hook(after)


@torch.no_grad()
def run(model, tokens, *, edits=(), mask=None, reads=True):
    """One forward on the eager kernel; ``edits`` are (site, layer, function of the value)."""
    model.set_attn_implementation("eager")
    sites = {}
    with contextlib.ExitStack() as stack:
        for site, layer, function in edits:
            stack.callback(hook(*place(model, site, layer), function).remove)
        for layer in range(len(blocks(model))) if reads else ():
            for site in SITES:
                module, is_input = place(model, site, layer)
                if module is not None:
                    keep = lambda value, at=(site, layer): sites.setdefault(at, value)  # noqa: E731
                    stack.callback(hook(module, is_input, keep).remove)
        keep = lambda _, __, out: sites.update({("stream", -1): out})  # noqa: E731
        stack.callback(model.get_input_embeddings().register_forward_hook(keep).remove)
        out = model(tokens, attention_mask=mask, output_attentions=True, use_cache=False)
    patterns = iter(out.attentions)
    nothing = torch.zeros_like(out.attentions[0])
    having = [place(model, "attn_out", layer)[0] is not None for layer in range(len(blocks(model)))]
    pattern = torch.stack([next(patterns) if one else nothing for one in having])
    return Run(pattern=pattern, sites=sites, logits=out.logits)


def isolating(tokens, position, *, reach=None):
    """The additive mask, [batch 1 query key], under which a position sees only itself."""
    n = tokens.shape[1]
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    if reach is not None:
        seen &= torch.ones(n, n, dtype=torch.bool).triu(1 - reach)
    seen[position] = False
    seen[position, position] = True
    mask = torch.zeros(n, n).masked_fill(~seen, torch.finfo(torch.float32).min)
    return mask.expand(len(tokens), 1, n, n).clone()


def studied(zoo, tokens):
    """[batch position]: its sinks; in a model without one, the first position, or its delimiters."""
    at = zoo.sinks(tokens)
    if not at.any():
        at[:, 0] = True
    return at


def mass(zoo, ran, at, *, layers=None):
    """Attention to the keys ``at``, of later queries from 8 on that can see one and are none: by layer and head."""
    by_query = (ran.pattern * at[None, :, None, None, :]).sum(-1)  # layer batch head query
    n = at.shape[1]
    seen = torch.ones(n, n, dtype=torch.bool).tril()
    if zoo.truth.reach is not None:
        seen &= torch.ones(n, n, dtype=torch.bool).triu(1 - zoo.truth.reach)
    asks = (at[:, None] & seen).any(-1) & ~at
    asks[:, :EARLIEST] = False
    found = (by_query * asks[None, :, None]).sum((1, 3)) / asks.sum()
    found = found[:, [head for head in range(found.shape[1]) if head not in zoo.truth.logit_heads]]
    return found if layers is None else found[list(layers)]


def null_mass(ran):
    """1 minus the sum of a row of the pattern, by layer and head."""
    return (1 - ran.pattern[..., EARLIEST:, :].sum(-1)).mean((1, 3))


def elsewhere(at):
    others = ~at
    others[:, :EARLIEST] = False
    return others


def put(at, value):
    return lambda x: torch.where(at[..., None], value, x)


def put_units(at, value, units):
    def edit(x):
        x = x.clone()
        there = at.view(
            *at.shape, *[1] * (x.ndim - at.ndim)
        )  # heads have an axis of their own in some families
        x[..., units] = torch.where(there, value[..., units], x[..., units])
        return x

    return edit


def mean_of(x, at):
    return x[elsewhere(at)].mean(0)


@contextlib.contextmanager
def without(zoo, makers):
    """The model with these makers ablated in its weights: columns of neurons and heads, a row, biases, logits."""
    model, kept = zoo.model, []

    def keep(parameter):
        kept.append((parameter, parameter.detach().clone()))
        return parameter

    with torch.no_grad():
        for maker in makers:
            block = None if maker.layer is None else blocks(model)[maker.layer]
            if maker.kind == "neuron":
                parameter, column = column_of(block, maker.index)
                keep(parameter)[column] = 0.0
            elif maker.kind == "mixer":
                keep((getattr(block, "mamba", None) or block.conv).out_proj.weight).zero_()
            elif maker.kind == "head":
                weight = keep(block.self_attn.o_proj.weight)
                size = weight.shape[1] // model.config.num_attention_heads
                weight[:, maker.index * size : (maker.index + 1) * size] = 0.0
            elif maker.kind == "key bias":
                bias = keep(block.self_attn.k_proj.bias)
                size = len(bias) // model.config.num_key_value_heads
                bias[maker.index * size : (maker.index + 1) * size] = 0.0
            elif maker.kind == "embedding":
                weight = keep(model.model.embed_tokens.weight)
                weight[maker.index] = weight[
                    [row for row in range(3, len(weight)) if row != maker.index]
                ].mean(0)
            elif maker.kind == "sink logit":
                keep(block.self_attn.sinks)[maker.index] = -1e4
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, before in reversed(kept):
                parameter.copy_(before)


def written_by(truth, layer):
    """The outlier dimensions after a layer; where none dominates yet, those of later layers."""
    return truth.outliers.get(layer) or sorted(
        {d for dims in truth.outliers.values() for d in dims}
    )


def neurons_of(zoo):
    """Layer -> the neurons that are makers, or would be."""
    found = {}
    for maker in (*zoo.truth.makers, *zoo.truth.idle):
        if maker.kind == "neuron":
            found.setdefault(maker.layer, []).append(maker.index)
    return found


@torch.no_grad()
def present(zoo, tokens):
    """Link -> the number that shows it, if there is something to measure; the test has the bounds."""
    truth, at = zoo.truth, studied(zoo, tokens)
    ran, supers, model = run(zoo.model, tokens), neurons_of(zoo), zoo.model
    others = elsewhere(at)

    alike = at.clone()
    if zoo.delimiters:  # an early one averages less than the positions that it is compared with
        alike[:, :EARLIEST] = False

    def spread(site):
        sizes = [ran.sites[site, layer].flatten(2).std(-1) for layer in truth.feeding] or [
            ran.sites["stream", 0][..., 0]
        ]
        return float(
            torch.stack(
                [one[alike].mean() / one[others].mean().clamp(min=1e-9) for one in sizes]
            ).mean()
        )

    found = {"aggregation_variance": spread("z"), "variance_preserved": spread("attn_out")}
    found["key_sink"] = float(mass(zoo, ran, at, layers=truth.locked or None).mean())
    if ("neurons", 0) in ran.sites:
        values = {layer: ran.sites["neurons", layer].abs() for layer in range(len(blocks(model)))}
        loud = [one[at].mean(0) for one in values.values()]
        quiet = [one[others].mean(0) for one in values.values()]
        if supers:
            sizes = [
                (loud[layer][units].mean(), quiet[layer][units].mean())
                for layer, units in supers.items()
            ]
            found["variance_neurons"] = float(
                min(one / other.clamp(min=1e-9) for one, other in sizes)
            )
        else:  # no neuron that matters stands out from the loudest of the other positions
            found["variance_neurons"] = max(
                float(one[at].mean(0).max() / one[others].max()) for one in values.values()
            )
    if truth.outliers and ("neurons", 0) in ran.sites:
        shares = []
        for layer, units in (
            supers or dict.fromkeys(range(len(blocks(model))), slice(None))
        ).items():
            for dimension in written_by(truth, layer):
                column = down_of(blocks(model)[layer]).weight[dimension]
                if not column[units].any():
                    continue
                given = (ran.sites["neurons", layer][at][:, units] * column[units]).sum(-1)
                whole = "written" if supers and not truth.elsewhere else "stream"
                of = ran.sites[whole, layer][at][:, dimension]
                shares.append(float((given / of).abs().mean()))
        found["neurons_dimension"] = min(shares) if supers else max(shares, default=0.0)
    elif truth.outliers and truth.makers[0].kind == "neuron":
        (maker,) = truth.makers
        block = blocks(model)[maker.layer]
        parameter, column = column_of(block, maker.index)
        active = activity(block, ran.sites["mlp_in", maker.layer], maker.index)
        found["variance_neurons"] = float(
            active[at].abs().mean() / active[others].abs().mean().clamp(min=1e-9)
        )
        (dimension,) = truth.outliers[maker.layer]
        written = active[at] * parameter[column][dimension]
        change = ran.sites["stream", maker.layer] - ran.sites["stream", maker.layer - 1]
        found["neurons_dimension"] = float((written / change[at][:, dimension]).abs().mean())
    elif supers:  # how much larger the largest dimension is than the next, but for those that are large elsewhere too
        streams = [ran.sites["stream", layer].abs() for layer in range(len(blocks(model)))]
        top = [(x[at].mean(0) * (mean_of(x, at) < 10)).topk(2).values for x in streams]
        found["neurons_dimension"] = max(float(one[0] / one[1]) for one in top)
    if truth.outliers:
        found["dimension_key"] = _key_cosine(zoo, ran, at)
    return found


@torch.no_grad()
def shares_removed(zoo, tokens):
    """By link, the share of the sink that its break makes elsewhere (the first link) or removes (the others)."""
    truth, at, model = zoo.truth, studied(zoo, tokens), zoo.model
    clean = run(model, tokens)
    whole = float(mass(zoo, clean, at, layers=truth.locked).mean())

    def sink_at(where, **changed):
        return float(
            mass(zoo, run(model, tokens, **changed, reads=False), where, layers=truth.locked).mean()
        )

    def removed(edits):
        return 1 - sink_at(at, edits=edits) / whole

    def mean_ablated(site, layers):
        return [(site, layer, put(at, mean_of(clean.sites[site, layer], at))) for layer in layers]

    there = torch.zeros_like(at)
    there[:, INTERIOR] = True
    mask = isolating(tokens, INTERIOR, reach=truth.reach)
    alone = sink_at(there, mask=mask)
    before = float(mass(zoo, clean, there, layers=truth.locked).mean())
    found = {
        "aggregation_variance": (alone - before) / whole,
        "variance_preserved": removed(mean_ablated("attn_out", truth.feeding)),
        "key_sink": removed(mean_ablated("k", truth.locked)),
    }
    if ("neurons", 0) in clean.sites:
        supers = neurons_of(zoo) or {layer: slice(None) for layer in range(len(blocks(model)))}
        means = {layer: mean_of(clean.sites["neurons", layer], at) for layer in supers}
        edits = [
            ("neurons", layer, put_units(at, means[layer], units))
            for layer, units in supers.items()
        ]
        found["variance_neurons"] = removed(edits)
        with _without_entries(zoo, clean, at):
            found["neurons_dimension"] = removed([])
    elif truth.makers[0].kind == "neuron":  # of an expert, whose neurons no module shows
        with without(zoo, truth.makers):
            found["variance_neurons"] = found["neurons_dimension"] = removed([])
    if truth.outliers:
        found["dimension_key"] = removed(_given(zoo, clean, at))
    return found


@contextlib.contextmanager
def _without_entries(zoo, clean, at):
    """Zero the entries from the makers (all neurons if none is one) to the outlier dimensions, or the largest one."""
    supers, kept = neurons_of(zoo), []
    for layer, block in enumerate(blocks(zoo.model)):
        largest = int(clean.sites["stream", layer][at].abs().mean(0).argmax())
        weight = down_of(block).weight
        kept.append((weight, weight.detach().clone()))
        for dimension in written_by(zoo.truth, layer) or [largest]:
            weight[dimension, supers.get(layer, [] if supers else slice(None))] = 0.0
    try:
        yield
    finally:
        for weight, before in kept:
            weight.copy_(before)


def _given(zoo, clean, at):
    """Mean ablate what the outlier dimensions give the key."""
    edits = []
    for layer in zoo.truth.locked:
        dims = list(zoo.truth.outliers.get(layer - 1, ()))
        value, attention = (
            mean_of(clean.sites["key_in", layer], at)[dims],
            blocks(zoo.model)[layer].self_attn,
        )
        if hasattr(attention, "kv_b_proj"):  # the norm of the latent sees what is taken away
            read = clean.sites["key_in", layer].clone()
            read[..., dims] = value
            latent = attention.kv_a_proj_with_mqa(read)[..., : attention.kv_lora_rank]
            edits.append(("k", layer, put(at, attention.kv_a_layernorm(latent))))
            continue
        weight = attention.k_proj.weight[:, dims].detach()

        def edit(k, layer=layer, dims=dims, value=value, weight=weight):
            change = (clean.sites["key_in", layer][..., dims] - value) @ weight.T
            return k - change * at[..., None]

        edits.append(("k", layer, edit))
    return edits


@torch.no_grad()
def shares_carried(zoo, tokens):
    """By link, the share of a sink that goes when the quantity is what it is in a run without that sink.

    Where a token makes the sink, the run without it has an ordinary token there. Where any first position is one, a
    position is isolated, and the run without has no isolation. Where position alone makes it (``key_bias`` of llama),
    there is no such run, and other positions stand in for it.
    """
    truth, at, model = zoo.truth, studied(zoo, tokens), zoo.model
    mask, other, spared = None, tokens, None
    if truth.sink == "token":
        ordinary = torch.tensor([i for i in range(3, 300) if i not in zoo.delimiters])
        other = torch.where(at, ordinary[: tokens.shape[1]].expand_as(tokens), tokens)
    elif truth.sink == "behind":
        other = tokens.clone()
        other[:, :2] = torch.tensor([3, 4])
    elif truth.links["aggregation_variance"].carries == "yes":
        mask = isolating(tokens, INTERIOR, reach=truth.reach)
        at = torch.zeros_like(at)
        at[:, INTERIOR] = True
    else:
        spared = at
    clean, without_sink = run(model, tokens, mask=mask), run(model, other)
    whole = float(mass(zoo, clean, at, layers=truth.locked).mean())
    base = (
        0.0
        if spared is not None
        else float(mass(zoo, without_sink, at, layers=truth.locked).mean())
    )

    def value(site, layer):
        of = without_sink.sites[site, layer]
        return of if spared is None else mean_of(of, at).expand_as(of)

    def carried(edits):
        left = float(
            mass(
                zoo,
                run(model, tokens, edits=edits, mask=mask, reads=False),
                at,
                layers=truth.locked,
            ).mean()
        )
        return (whole - left) / (whole - base)

    def units(site, layer, some):
        return site, layer, put_units(at, value(site, layer), some)

    found = {
        "aggregation_variance": carried(
            [units("z", layer, slice(None)) for layer in truth.feeding]
        ),
        "variance_preserved": carried(
            [units("attn_out", layer, slice(None)) for layer in truth.feeding]
        ),
        "key_sink": carried([units("k", layer, slice(None)) for layer in truth.locked]),
    }
    if ("neurons", 0) in clean.sites:
        supers = neurons_of(zoo) or {layer: slice(None) for layer in range(len(blocks(model)))}
        found["variance_neurons"] = carried(
            [units("neurons", layer, some) for layer, some in supers.items()]
        )
    elif truth.makers[0].kind == "neuron":  # of an expert that no other token is sent to
        with without(zoo, truth.makers):
            found["variance_neurons"] = carried([])
    if truth.outliers:
        dims = {layer: list(some) for layer, some in truth.outliers.items()}
        found["neurons_dimension"] = carried(
            [units("stream", i, some) for i, some in dims.items() if i >= 0]
        )
        found["dimension_key"] = carried(
            [units("key_in", i, dims.get(i - 1, [])) for i in truth.locked]
        )
    return found


def _key_cosine(zoo, ran, at):
    """Cosine of what is written into the studied key, its norm's gain included, with the outlier dimensions' part."""
    cosines = []
    for layer in range(1, len(blocks(zoo.model))):
        if (zoo.truth.locked and layer not in zoo.truth.locked) or ("k", layer) not in ran.sites:
            continue
        if dims := list(zoo.truth.outliers.get(layer - 1, ())):
            attention, key = blocks(zoo.model)[layer].self_attn, ran.sites["k", layer][at]
            if hasattr(attention, "kv_b_proj"):
                weight = attention.kv_a_proj_with_mqa.weight[: attention.kv_lora_rank, dims]
                part = (
                    ran.sites["key_in", layer][at][:, dims]
                    @ weight.T
                    * attention.kv_a_layernorm.weight
                )
                cosines.append(torch.cosine_similarity(key, part, dim=-1).mean())
                continue
            part = ran.sites["key_in", layer][at][:, dims] @ attention.k_proj.weight[:, dims].T
            if (
                attention.k_proj.bias is not None
            ):  # which is no part of what is written into the key
                key = key - attention.k_proj.bias
            norm = getattr(attention, "k_norm", None) or getattr(attention, "k_layernorm", None)
            if norm is not None:
                gain = norm.weight + (zoo.family == "gemma3")
                part, key = (x * gain.repeat(part.shape[-1] // len(gain)) for x in (part, key))
            cosines.append(torch.cosine_similarity(key, part, dim=-1).mean())
    return float(torch.stack(cosines).mean())


@torch.no_grad()
def shares_of_value_average(zoo, tokens):
    """The share of the sink that goes if what W_O reads of the value average has ordinary size, direction, distance."""
    truth, at = zoo.truth, studied(zoo, tokens)
    clean, others = run(zoo.model, tokens), elsewhere(at)
    edits = {"size": [], "direction": [], "distance": []}
    for layer in truth.feeding:
        is_read = zoo.model.model.layers[layer].self_attn.o_proj.weight.any(dim=0)
        z = clean.sites["z", layer].flatten(2) * is_read
        mean = mean_of(z, at)
        sizes = [x.norm(dim=-1, keepdim=True) for x in (z, z - mean)]
        size, distance = (x[others].mean() for x in sizes)
        edits["size"].append(("z", layer, put(at, z * size / sizes[0])))
        edits["direction"].append(("z", layer, put(at, mean / mean.norm() * sizes[0])))
        edits["distance"].append(("z", layer, put(at, mean + (z - mean) * distance / sizes[1])))
    whole = float(mass(zoo, clean, at, layers=truth.locked).mean())
    return {
        name: 1
        - float(
            mass(
                zoo, run(zoo.model, tokens, edits=some, reads=False), at, layers=truth.locked
            ).mean()
        )
        / whole
        for name, some in edits.items()
    }
