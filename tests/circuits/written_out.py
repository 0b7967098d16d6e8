"""A run in which every reader has a stream of its own, by the plain model's modules, and its scores by autograd."""

import torch

from sink_lens.models.sites import SITES, bridge_hook_name, read_site

from .tiny_runs import pair


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
        return bridge_hook_name(SITES[site], family=self.lens.family, layer=layer)

    def attention(self, layer):
        return self.lens.layer(layer).get_submodule(self.lens.family.attention)

    def keeper(self, site, layer):
        def keep(x, hook):
            self.kept[site, layer] = x

        return keep

    def check(self, new, x):
        """What is written out is what the model computes."""
        torch.testing.assert_close(new, x, atol=1e-5, rtol=1e-5)

    def own_stream(self, name, x):
        self.zeros[name] = torch.zeros_like(x, requires_grad=True)
        return x + self.zeros[name]

    def norm(self, layer, path):
        return (
            (lambda x: x)
            if path is None
            else self.norm_of(self.lens.layer(layer).get_submodule(path))
        )

    def norm_of(self, module):
        return module

    def projector(self, kind, layer):
        family = self.lens.family
        address = SITES[kind].address(family)
        sizes = self.lens.head_sizes(0)

        def project(x, hook):
            heads = []
            for head in range(x.shape[2]):
                stream = self.own_stream(f"a{layer}.{head}<{kind}>", self.kept["resid_pre", layer])
                out = self.lens.layer(layer).get_submodule(address.module)(
                    self.norm(layer, family.attn_norm)(stream)
                )
                heads.append(
                    read_site(out, address=address, family=family, batch=len(x), **sizes)[
                        :, :, head
                    ]
                )
            new = torch.stack(heads, 2)
            self.check(new, x)
            return new

        return project

    def gate_reader(self, layer):
        def project(x, hook):
            parts = x.unflatten(-1, (self.lens.n_heads, -1)).shape[-1]
            heads = []
            for head in range(self.lens.n_heads):
                stream = self.own_stream(f"a{layer}.{head}<g>", self.kept["resid_pre", layer])
                out = self.attention(layer).head_gate(
                    self.norm(layer, self.lens.family.attn_norm)(stream)
                )
                heads.append(out[..., head * parts : (head + 1) * parts])
            return torch.cat(heads, -1)

        return project

    def mlp_reader(self, layer):
        config, family = self.lens.config, self.lens.family
        parallel = getattr(config, "use_parallel_residual", False) or family.architecture in (
            "CohereForCausalLM", "Cohere2ForCausalLM", "PhiForCausalLM", "FalconForCausalLM", "GPTJForCausalLM",
        )  # fmt: skip

        def reader(x, hook):
            stream = self.kept["resid_pre", layer] + (
                0 if parallel else self.kept["attn_out", layer]
            )
            new = self.norm(layer, family.mlp_norm)(self.own_stream(f"m{layer}", stream)).reshape(
                x.shape
            )
            self.check(new, x)
            return new

        return reader

    def last_reader(self):
        def reader(x, hook):
            stream = self.own_stream("logits", self.kept["resid_post", self.lens.n_layers - 1])
            return self.norm_of(self.lens.plain.get_submodule(self.lens.family.final_norm))(stream)

        return reader

    def of_heads(self, layer):
        """(what each head adds through the output projection alone, the bias, which belongs to no head)."""
        z, o = self.kept["z", layer], self.attention(layer).get_submodule(self.lens.family.o)
        bias = o(torch.zeros_like(z).flatten(2))
        heads = torch.eye(self.lens.n_heads, dtype=torch.bool)[:, :, None]
        return [o(torch.where(one, z, 0).flatten(2)) - bias for one in heads], bias

    def written(self):
        """Return the output that each writer adds to the stream."""
        found = [self.kept["resid_pre", 0]]
        for layer in range(self.lens.n_layers):
            heads, _ = self.of_heads(layer)
            total = self.attention(layer).get_submodule(self.lens.family.o)(
                self.kept["z", layer].flatten(2)
            )
            factor = (
                self.kept["attn_out", layer] / total
            )  # a norm or a multiplier behind it, element by element
            found += [one * factor for one in heads]
            found.append(self.kept["mlp_out", layer])
        return [one.detach() for one in found]


class WithCircuit(WrittenOut):
    """The same with only some edges: a reader sums its own stream, of what is added in this run or on other tokens."""

    def __init__(self, lens, tokens, *, kept, instead):
        self.edges = set(kept)
        self.instead = instead if isinstance(instead, list) else WrittenOut(lens, instead).written()
        super().__init__(lens, tokens)

    def check(self, new, x):
        """Readers read other streams than the model's."""

    def own_stream(self, name, x):
        layer = self.lens.n_layers if name == "logits" else int(name[1:].split(".")[0])
        before = [(one, kind) for one in range(layer) for kind in "am"] + [
            (layer, "a")
        ] * name.startswith("m")
        total = self.kept["resid_pre", 0] if self.holds("input", name) else self.instead[0]
        for one, kind in before:
            at = 1 + one * (self.lens.n_heads + 1)
            if kind == "m":
                mlp = self.kept["mlp_out", one]
                total = total + (
                    mlp if self.holds(f"m{one}", name) else self.instead[at + self.lens.n_heads]
                )
                continue
            heads, bias = self.of_heads(one)
            total = total + bias
            for head, part in enumerate(heads):
                total = total + (
                    part if self.holds(f"a{one}.h{head}", name) else self.instead[at + head]
                )
        return total

    def holds(self, writer, reader):
        """Check that an edge is kept; keys and values are named by their key-value head."""
        alone = reader.endswith("<q>") or self.lens.n_kv_heads == self.lens.n_heads
        return f"{writer}->{reader.replace('.', '.h' if alone else '.kv')}" in self.edges


class HeldNorms(WrittenOut):
    """The same with norms whose divisor is a constant of the backward pass."""

    def norm_of(self, module):
        def norm(x):
            off, gain = (
                module(torch.zeros_like(x)).detach(),
                module.weight.detach() + self.lens.family.gain_offset,
            )
            c = gain * (x - x.mean(-1, keepdim=True) if self.lens.family.centred_norm else x)
            size = (module(x) - off).detach().norm(dim=-1, keepdim=True) / c.detach().norm(
                dim=-1, keepdim=True
            )
            return c * size + off

        return norm


def written_out(lens, names, made=WrittenOut):
    """EAP's score of every edge by pair: the readers one by one, by autograd."""
    clean, corrupted = pair()
    run = made(lens, clean)
    rows = torch.arange(len(clean))
    value = (run.logits[rows, -1, [5, 6, 9]] - run.logits[rows, -1, [7, 8, 10]]).sum()
    gradients = dict(
        zip(run.zeros, torch.autograd.grad(value, list(run.zeros.values())), strict=True)
    )
    differences = [
        a - b for a, b in zip(run.written(), WrittenOut(lens, corrupted).written(), strict=True)
    ]
    writers = ["input"]
    for layer in range(lens.n_layers):
        writers += [*(f"a{layer}.h{head}" for head in range(lens.n_heads)), f"m{layer}"]
    found = []
    for name in names:
        writer, reader = name.split("->")
        reader = reader.replace(".h", ".").replace(".kv", ".")
        found.append((differences[writers.index(writer)] * gradients[reader]).sum((1, 2)))
    return torch.stack(found, 1)
