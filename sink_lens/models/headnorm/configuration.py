"""The configuration of ``HeadNormForCausalLM``: Llama's, and what its attention and its heads' output do."""

from dataclasses import fields
from difflib import get_close_matches
from typing import Any, no_type_check

from transformers import LlamaConfig

from ...errors import InputError

ATTENTIONS = ("softmax", "sigmoid", "gate_elementwise", "gate_headwise", "sink_logit")
"""How scores become weights, and what is done to the head's output: see ``HeadNormConfig.attention``."""
VALUE_NORMS = ("none", "shared", "per_head", "position")
"""What is done to the aggregated values: nothing, a norm with one gain for all heads or one a head, or a scale."""
VALUE_NORM_INITS = ("first_token", "dummy_pass", "ones")
"""How the gain begins."""
_OLD = frozenset({"tie_encoder_decoder", "use_return_dict"})
"""Fields that configurations saved by earlier versions of transformers have; their names are near those of others."""


@no_type_check  # its __init__ takes more than its signature says
class HeadNormConfig(LlamaConfig):
    """Llama's configuration with the attention's variant and the norm of the aggregated values.

    Raises:
        InputError: a value that is none of those listed, here and whenever the configuration is saved; a misspelt name.
    """

    model_type = "sink_lens_headnorm"

    attention: str = "softmax"
    """``softmax``; ``sigmoid``: weights ``sigmoid(q.k / sqrt(d_head))``, causal, without normalisation;
    ``gate_elementwise`` and ``gate_headwise``: the head's output times ``sigmoid(W_g x)``, one number an element or
    a head; ``sink_logit``: a learned logit a head in the denominator of the softmax, 0 at first. What it takes from all
    values of a head alike, a ``value_norm`` gives back: the two together learn almost nothing of it."""
    value_norm: str = "none"
    """``z / RMS(z) * gamma`` in each head, after aggregation and before the gate and W_O: ``none``, ``shared`` (gamma
    of d_head numbers) or ``per_head`` (of n_heads x d_head). ``position`` is no norm and has no weights: z times
    ``sqrt(position + 1)``, which undoes what an average of so many independent values takes from their spread. It goes
    by the position ids; the model counts them itself unless they are given, as left-padded sequences need it."""
    value_norm_init: str = "first_token"
    """gamma at first: ``first_token``, the size of the first token's head output on random inputs (mean of 64 draws,
    unbiased; ours); ``dummy_pass``, the same by one draw and the biased deviation (arXiv 2605.06611, released code); or
    ``ones``."""
    value_norm_eps: float = 1e-6
    """Added to the mean square."""
    qk_norm: bool = False
    """Queries and keys go through an RMSNorm in each head before the rotation, as in Qwen3."""
    output_bias: bool | None = None
    """Whether W_O has a bias; None is ``attention_bias``. Qwen2 has biases on the other three only."""

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in what is None, and check before anything reads the fields.

        Raises:
            InputError: a value that is none of those listed, or a name that is nearly a field's: transformers keeps
                what it does not know, and the model would be built without it.
        """
        for name in kwargs.keys() - _OLD:
            if near := get_close_matches(name, [field.name for field in fields(self)], n=1, cutoff=0.8):
                raise InputError(f"{name} is no field of HeadNormConfig; did you mean {near[0]}?")
        if self.output_bias is None:
            self.output_bias = self.attention_bias
        super().__post_init__(**kwargs)
        self._check_variant()

    def validate(self) -> None:
        """Called by transformers before it saves.

        Raises:
            InputError: a value that is none of those listed.
        """
        super().validate()  # type: ignore[misc]  # huggingface_hub adds it to the class
        self._check_variant()

    def _check_variant(self) -> None:
        """Refuse a value that is none of those listed.

        Raises:
            InputError: naming the field, what was found and what is needed.
        """
        known = {"attention": ATTENTIONS, "value_norm": VALUE_NORMS, "value_norm_init": VALUE_NORM_INITS}
        for field, values in known.items():
            if getattr(self, field) not in values:
                raise InputError(f"{field} is {getattr(self, field)!r}; need one of {', '.join(values)}")
        if self.value_norm == "position" and self.attention == "sigmoid":
            raise InputError(
                "value_norm is 'position' and attention 'sigmoid', whose weights do not sum to 1; need an average to "
                "undo: another attention, or value_norm = 'shared'"
            )
        for field in ("qk_norm", "output_bias"):
            if not isinstance(getattr(self, field), bool):
                raise InputError(f"{field} is {getattr(self, field)!r}; need true or false")
        if not (isinstance(self.value_norm_eps, (int, float)) and self.value_norm_eps >= 0):
            raise InputError(f"value_norm_eps is {self.value_norm_eps!r}; need a number, 0 or more")
