"""Prefix-Tuning+: a trained module beside each attention head, where prefix-tuning puts trained keys inside it.

Prefix-tuning gives every head more keys and values, which share one softmax with the input: a long prefix crowds out
the input, a long input dilutes the prefix. Prefix-Tuning+ (arXiv 2506.13674, later PrefixMemory-Tuning) takes the
prefix out of the softmax::

    z + phi(q) M

z is the output of a head (the site ``z``), q its query, phi a feature map and M a trained matrix of ``d_head`` x
``d_head`` for each layer and key-value head. M begins at zero, so that the model begins as it was. The attention
pattern of the layer is left as it is, and with it the layer's sinks; later layers read another stream.

``get_prefix_model`` does what ``peft.get_peft_model`` does, without PEFT.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from einops import einsum, rearrange
from jaxtyping import Float
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import elu
from transformers import PreTrainedModel

from ..configuration import check_at_least, check_field_types, make_config, refuse_unknown_names
from ..errors import InputError, ModelError
from ..files import parse_json
from ..models import checks
from ..models.families import head_sizes
from ..models.family import Family
from ..models.interfaced import give_attention_interface
from ..models.private_apis import source_of_config
from ..models.sites import SITES, bridge_hook_name, read_site
from ..signatures import takes

CONFIG_FILE, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
"""What PEFT calls the two files of an adapter."""
_TYPE = "PREFIX_TUNING_PLUS"
_NAME = "prefix_memory"
"""Name of the trained module in the attention module that it belongs to."""

Phi = Literal["elu", "elu_plus_one", "constant"]
_PHI: dict[Phi, Callable[[Tensor], Tensor]] = {
    "elu": elu,
    "elu_plus_one": lambda q: elu(q) + 1,
    "constant": lambda q: torch.ones_like(q[..., :1]),  # a single feature, which drops the query
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixConfig:
    """Configuration of the module beside the heads. The defaults are the paper's, as far as it says."""

    phi: Phi = "elu"
    """Feature map of the query. ``elu`` is the paper's; ``elu_plus_one`` is linear attention's, where every feature is
    positive; ``constant`` drops the query (one bias per head)."""
    share: Literal["kv_head", "head"] = "kv_head"
    """What has a matrix of its own. With ``kv_head`` the query heads that share keys and values share M, as they would
    share a prefix, and the parameters are those of a prefix of ``d_head / 2`` tokens; with ``head`` they do not."""
    rank: int | None = None
    """Rank of M, or None for a full matrix. M of rank r is a sum of r outer products of a key and a value, which are
    the parameters of a prefix of r tokens; its values begin at zero and its keys at random."""
    layers: tuple[int, ...] | None = field(default=None, metadata={"written": "ranges"})
    """Layers that get a module; None for all that have attention."""
    seed: int = 0
    """Seed of the keys of a limited rank; a full M has nothing random."""

    def __post_init__(self) -> None:
        check_field_types(self)
        check_at_least(self, 1, "rank")
        if self.phi == "constant" and self.rank is not None:
            raise InputError(
                f"phi is constant and rank {self.rank}: M has one row then; need rank None"
            )
        if self.layers is not None and len(set(self.layers)) < len(self.layers):
            raise InputError(f"layers {self.layers} names a layer twice; need each once")


def prefix_output(
    query: Float[Tensor, "batch position head d_head"],
    *matrices: Float[Tensor, "kv_head row value"],
    phi: Phi = "elu",
) -> Float[Tensor, "batch position head value"]:
    """Compute ``phi(q) M``, which Prefix-Tuning+ adds to the heads' outputs.

    Args:
        query: queries as they are projected, before a norm or a rotation, so that equal queries add the same at every
            position. (The paper does not say which queries; its phi(q) M has no position.)
        *matrices: M with the shape "kv_head d_head d_head"; or keys and values, "kv_head prefix d_head" each, whose
            outer products add up to M.
        phi: the feature map; see ``PrefixConfig.phi``.
    """
    features = rearrange(
        _PHI[phi](query),
        "batch position (kv group) d -> batch position kv group d",
        kv=len(matrices[0]),
    )
    *keys, values = matrices
    if len(keys) > 1:
        raise InputError(f"{len(matrices)} matrices were given; need M, or keys and values")
    for key in keys:
        features = einsum(
            features, key, "batch position kv group d, kv f d -> batch position kv group f"
        )
    added = einsum(
        features, values, "batch position kv group f, kv f d -> batch position kv group d"
    )
    return added.flatten(2, 3)


def bridge_hooks(
    layer: int,
    *matrices: Float[Tensor, "kv_head row value"],
    phi: Phi = "elu",
    family: Family | None = None,
) -> list[tuple[str, Callable[..., Tensor | None]]]:
    """Return the ``fwd_hooks`` that add ``prefix_output`` to the heads of one layer of a TransformerLens bridge.

    The family is needed if the bridge's hook point of the queries holds more than queries, as in Qwen3.5.
    """
    held: list[Tensor] = []

    def keep_query(q: Tensor, hook: object) -> None:
        held[:] = [q]

    def add_output(z: Tensor, hook: object) -> Tensor:
        return z + prefix_output(held.pop().to(matrices[0].dtype), *matrices, phi=phi).to(z.dtype)

    q, z = (SITES[name] for name in ("q", "z"))
    queries = (
        q.hook_name(layer) if family is None else bridge_hook_name(q, family=family, layer=layer)
    )
    return [(queries, keep_query), (z.hook_name(layer), add_output)]


class PrefixMemory(nn.Module):
    """M of one layer, trained in float32 (float64 in a model of that type), with the hooks that put it in place."""

    def __init__(
        self, family: Family, *, config: PrefixConfig, sizes: Mapping[str, int], dtype: torch.dtype
    ) -> None:
        super().__init__()
        self._family, self._sizes = family, dict(sizes)
        self.phi: Phi = config.phi
        self._query: Tensor | None = None
        n = sizes["n_heads"] if config.share == "head" else sizes["n_kv_heads"]
        d_head, exact = sizes["d_head"], torch.promote_types(torch.float32, dtype)
        if config.rank is None:
            rows = 1 if config.phi == "constant" else d_head
            self.memory = nn.Parameter(torch.zeros(n, rows, d_head, dtype=exact))
        else:
            self.keys = nn.Parameter(torch.zeros(n, config.rank, d_head, dtype=exact))
            self.values = nn.Parameter(torch.zeros(n, config.rank, d_head, dtype=exact))

    @property
    def matrices(self) -> tuple[Tensor, ...]:
        """(M,), or (keys, values) if the rank of M is limited."""
        return tuple(self.parameters())

    def forward(
        self, query: Float[Tensor, "batch position head d_head"]
    ) -> Float[Tensor, "batch position head d_head"]:
        return prefix_output(query.to(self.matrices[0].dtype), *self.matrices, phi=self.phi)

    def attach(self, attention: nn.Module) -> list[Any]:
        q, o = (attention.get_submodule(name) for name in (self._family.q, self._family.o))
        return [
            q.register_forward_hook(self._keep_queries),
            o.register_forward_pre_hook(self._add_output),
        ]

    def _keep_queries(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        address = SITES["q"].address(self._family)
        assert address is not None  # every family has queries
        self._query = read_site(
            output, address=address, family=self._family, batch=len(output), **self._sizes
        )

    def _add_output(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if self._query is None:
            raise ModelError(
                "W_O ran and the query projection did not, as on a bridge that splits a fused projection; need the "
                "Hugging Face model, or the bridge of the model without the module (unload) with bridge_hooks()"
            )
        query, self._query = self._query, None
        return (args[0] + self(query).flatten(2).to(args[0].dtype), *args[1:])


class PrefixModel(nn.Module):
    """A Hugging Face model with a module outside its heads; made by ``get_prefix_model``, used as a ``PeftModel`` is.

    It cannot be merged: no weight of the model computes phi, so that there is none to add M to. Calls, ``generate``
    and attributes go to the model. ``state_dict``, and so a checkpoint of a Trainer, has the trained matrices alone.
    """

    def __init__(self, model: PreTrainedModel, config: PrefixConfig) -> None:
        super().__init__()
        if not isinstance(model, PreTrainedModel):
            raise ModelError(
                f"found {type(model).__name__}; need a transformers PreTrainedModel, such as lens.plain"
            )
        family = checks.checked_family(model)
        if family.kv_latent is not None or family.own_sizes:
            why = "makes its queries inside its attention (latent attention), where no module gives them to this one"
            why = "has heads of another width in some layers" if family.own_sizes else why
            raise ModelError(f"{family.architecture} {why}; need another model")
        give_attention_interface(model)
        if any(name.endswith(f".{_NAME}") for name, _ in model.named_modules()):
            raise ModelError(
                "this model has a module outside its heads already; need one without. Call unload first"
            )
        layers: Any = model.get_submodule(family.layers)
        top = family.attention.partition(".")[0]
        have = [
            index for index, layer in enumerate(layers) if getattr(layer, top, None) is not None
        ]
        wanted = have if config.layers is None else list(config.layers)
        if missing := sorted(set(wanted) - set(have)):
            raise InputError(
                f"layers {missing} have no attention or are not there; need some of {have}"
            )
        self.base_model, self.prefix_config = model, config
        self._trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model.requires_grad_(requires_grad=False)
        sizes = head_sizes(model.config, family=family, layer=0)
        generator = torch.Generator().manual_seed(config.seed)
        self.memories: dict[int, PrefixMemory] = {}
        """Layer -> its module, which is a part of the attention module ``prefix_memory``."""
        self._hooks: list[Any] = []
        for index in wanted:
            attention = layers[index].get_submodule(family.attention)
            memory = PrefixMemory(family, config=config, sizes=sizes, dtype=model.dtype)
            if config.rank is not None:
                drawn = torch.randn(memory.keys.shape, generator=generator, dtype=torch.float64)
                memory.keys.data.copy_(drawn * sizes["d_head"] ** -0.5)
            memory.to(next(attention.get_submodule(family.o).parameters()).device)
            memory.train(model.training)
            attention.add_module(_NAME, memory)
            self._hooks += memory.attach(attention)
            self.memories[index] = memory

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Call the model with its prefix; the named arguments are the columns that a Trainer keeps."""
        return self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            labels=labels,
            **kwargs,
        )

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate text with the prefix."""
        return self.base_model.generate(*args, **kwargs)  # pyright: ignore[reportCallIssue]

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "base_model":
                raise
            return getattr(self.base_model, name)

    def get_base_model(self) -> PreTrainedModel:
        """Return the Hugging Face model, the prefix still on its heads."""
        return self.base_model

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Return the numbers of trained and of all parameters, the model's among them."""
        counted = [(parameter.requires_grad, parameter.numel()) for parameter in self.parameters()]
        return sum(n for trained, n in counted if trained), sum(n for _, n in counted)

    def print_trainable_parameters(self) -> None:
        """Print the numbers of trainable and of all parameters, and the percentage, in PEFT's words."""
        trained, every = self.get_nb_trainable_parameters()
        line = f"trainable params: {trained:,d} || all params: {every:,d} || trainable%: {100 * trained / every:.4f}\n"
        sys.stdout.write(line)  # as PEFT's method; the library prints nothing else

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the trained matrices by name, without the model's weights."""
        every = super().state_dict(*args, **kwargs)
        for name in [name for name in every if f".{_NAME}." not in name]:
            del every[name]
        return every

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Load what ``state_dict`` returned. All must be there, whatever ``strict`` says.

        Raises:
            ModelError: other names or shapes.
        """
        own = self.state_dict()
        if wrong := sorted(own.keys() ^ state_dict.keys()):
            raise ModelError(
                f"the adapter differs from this model's in {len(wrong)} matrices ({wrong[0]}, ...); need one with the "
                "same layers and rank"
            )
        for name, tensor in state_dict.items():
            if tensor.shape != own[name].shape:
                raise ModelError(
                    f"{name} of the adapter is {tuple(tensor.shape)} and needs to be {tuple(own[name].shape)}: it "
                    "belongs to another model"
                )
        found = super().load_state_dict(state_dict, strict=False, assign=assign)
        found.missing_keys.clear()  # the model's own weights, which are not in an adapter
        return found

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Write ``adapter_model.safetensors`` and ``adapter_config.json`` into a folder."""
        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()
        }
        save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})
        about = {
            "peft_type": _TYPE,
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": source_of_config(self.base_model.config),
            "base_model_class": type(self.base_model).__name__,
        }
        text = json.dumps(about | asdict(self.prefix_config), indent=2)
        (folder / CONFIG_FILE).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def from_pretrained(
        cls,
        model: PreTrainedModel,
        model_id: str | Path,
        *,
        is_trainable: bool = False,
        config: PrefixConfig | None = None,
    ) -> "PrefixModel":
        """Put the module that was saved in ``model_id`` onto the model that it was trained on.

        Args:
            model: the model.
            model_id: folder of ``save_pretrained``, or a checkpoint of a Trainer.
            is_trainable: True to train the module on; otherwise nothing has a gradient.
            config: needed for a checkpoint of a Trainer, which holds matrices alone; None reads the folder's.

        Raises:
            ModelError: the folder holds no such adapter, or one of another class of models or other sizes.
        """
        folder = Path(model_id)
        if config is None:
            config = _read_saved_config(folder, architecture=type(model).__name__)
        files = (folder / name for name in (WEIGHTS_FILE, "model.safetensors"))
        file = next((one for one in files if one.is_file()), None)
        if file is None:
            raise ModelError(
                f"{folder} has no {WEIGHTS_FILE}; need the folder that save_pretrained wrote"
            )
        try:
            tensors = load_file(file)
        except SafetensorError as error:
            raise ModelError(
                f"{file} cannot be read ({error}); need it whole. Save it again"
            ) from error
        made = cls(model, config)
        try:
            made.load_state_dict(tensors)
        except ModelError:
            made.unload()
            raise
        if not is_trainable:
            made.requires_grad_(requires_grad=False)
        return made

    def unload(self) -> PreTrainedModel:
        """Take the prefix off the heads; return the model, whose parameters are trainable again if they were before."""
        for hook in self._hooks:
            hook.remove()
        for module in list(self.base_model.modules()):
            if _NAME in module._modules:
                delattr(module, _NAME)
        for parameter in self._trained:
            parameter.requires_grad_()
        return self.base_model

    def bridge_hooks(self) -> list[tuple[str, Callable[..., Tensor | None]]]:
        """Return the trained prefix as hooks of TransformerLens: ``lens.bridge.run_with_hooks(..., fwd_hooks=...)``.

        The bridge is that of the model without the module; make it before ``get_prefix_model``, or after ``unload``.
        """
        family = checks.checked_family(self.base_model)
        return [
            one
            for layer, each in self.memories.items()
            for one in bridge_hooks(layer, *each.matrices, phi=each.phi, family=family)
        ]


@takes(PrefixConfig, loads=True)
def get_prefix_model(
    model: PreTrainedModel, config: PrefixConfig | None = None, **fields: Any
) -> PrefixModel:
    """Put a trained module outside the attention heads of a model, and freeze the rest, in place.

    ``unload`` undoes it.

    Args:
        model: a Hugging Face model of a known family; ``load(...).plain`` is one.
        config: the defaults if None.
        **fields: of ``PrefixConfig``; they win over ``config``.

    Raises:
        ModelError: the class is of no known family, or the model has such a module already.
        InputError: a field is unknown, or its value is not allowed.
    """
    return PrefixModel(model, make_config(PrefixConfig, config, fields))


def _read_saved_config(folder: Path, *, architecture: str) -> PrefixConfig:
    try:
        saved = parse_json((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{folder} has no {CONFIG_FILE} that can be read; need the folder that save_pretrained wrote. For a "
            "Trainer's checkpoint, which holds matrices alone, give config="
        ) from error
    kind = saved.get("peft_type") if isinstance(saved, dict) else None
    if kind != _TYPE:
        raise ModelError(
            f"{folder} is an adapter of the type {kind}; need {_TYPE}. Open others with PEFT"
        )
    if saved.get("base_model_class") != architecture:
        raise ModelError(
            f"the adapter is of a {saved.get('base_model_class')}; need that and not {architecture}"
        )
    about = ("peft_type", "task_type", "base_model_name_or_path", "base_model_class")
    fields = {name: saved[name] for name in saved if name not in about}
    refuse_unknown_names(fields, PrefixConfig.__dataclass_fields__, where=str(folder / CONFIG_FILE))
    return make_config(PrefixConfig, None, fields)
