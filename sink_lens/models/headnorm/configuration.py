"""The configuration of ``HeadNormForCausalLM``: Llama's, plus the variants of its attention and heads' output."""

from dataclasses import fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, get_args, no_type_check

from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig

from ...errors import InputError
from ..variants import Attention, StreamNorm, ValueNorm, ValueNormInit

ATTENTIONS: tuple[Attention, ...] = get_args(Attention)
VALUE_NORMS: tuple[ValueNorm, ...] = get_args(ValueNorm)
NORMS: tuple[StreamNorm, ...] = get_args(StreamNorm)
VALUE_NORM_INITS: tuple[ValueNormInit, ...] = get_args(ValueNormInit)
_OLD = frozenset({"tie_encoder_decoder", "use_return_dict"})
"""Fields that earlier versions of transformers saved."""


def _raise_input_errors(cls: type) -> type:
    """Make a class's ``__init__`` raise ``InputError`` for a field that transformers refuses.

    Most fields are checked before ``__post_init__``, by an ``__init__`` that transformers writes for each subclass.
    """
    written = cls.__init__

    @wraps(written)
    def checked(self: Any, *args: Any, **given: Any) -> None:
        try:
            written(self, *args, **given)
        except (AttributeError, TypeError, ValueError, StrictDataclassError) as error:
            raise InputError(
                f"a field cannot be used ({error}); need values as LlamaConfig takes them"
            ) from error

    cls.__init__ = checked
    return cls


@_raise_input_errors
@no_type_check  # its __init__ accepts more than its signature shows
class HeadNormConfig(LlamaConfig):
    """Llama's configuration with the variant of the attention and the norm of the aggregated values.

    Raises:
        InputError: a value is not one of those listed (checked here and at every save) or has another type, or a name
            is misspelt.
    """

    model_type = "sink_lens_headnorm"

    attention: str = "softmax"
    """Variant of the attention. ``softmax``: the usual attention. ``sigmoid``: weights ``sigmoid(q.k / sqrt(d_head))``,
    causal, without normalisation. ``gate_elementwise`` and ``gate_headwise``: the head's output times
    ``sigmoid(W_g x)``, with one number per element or per head. ``sink_logit``: one learned logit per head in the
    denominator of the softmax, initially 0. A ``value_norm`` undoes the common factor by which the sink logit shrinks
    the values of a head, so with both the logit learns almost nothing. ``off_by_one``: the same with the logit fixed at
    0, that is ``exp(s_i) / (1 + sum_j exp(s_j))``. ``key_bias``: one learned key a head,
    initially 0, whose value is 0: the logit in the denominator is the query, as projected, times this key, over
    sqrt(d_head) (arXiv 2410.10781; neither is normed or rotated here, so that its share depends on no position)."""
    norm: str = "rms"
    """Norm of the residual stream before attention, MLP and unembedding: ``rms``, an RMSNorm with a gain for each
    dimension, or ``single_scale``, with one gain for all of them (arXiv 2506.19697), which no dimension can use to
    stand out."""
    value_norm: str = "none"
    """Norm of each head's aggregated values, ``z / RMS(z) * gain``, before the gate and W_O: ``none``, ``shared``
    (the gain has d_head numbers) or ``per_head`` (n_heads x d_head numbers). ``position`` is a scale without
    weights: it multiplies z by ``sqrt(position + 1)``, since averaging that many independent values shrinks their
    standard deviation by the same factor. The model counts positions itself unless position ids are given, which
    left-padded sequences need."""
    value_norm_init: str = "matched"
    """The gain at first: ``first_token``, the size of the first token's head output on random inputs (mean of 64 draws,
    unbiased; ours); ``dummy_pass``, the same by one draw and the biased deviation (arXiv 2605.06611, released code);
    ``ones``; or ``matched``, the root mean square that z has in the same model without the norm, by layer (and by head
    for a gain per head), on random tokens (ours). The others give every token's z the size of the first token's, while
    without the norm z shrinks with the position: only ``matched`` lets attention write as much as it does without."""
    value_norm_length: int | None = None
    """Tokens of the sequences on which ``matched`` is measured: those that the model will be trained on. None takes
    ``max_position_embeddings``, at most 4,096; ``train`` sets its own length."""
    value_norm_eps: float = 1e-6
    """Number added to the mean square of the value norm."""
    qk_norm: bool = False
    """True if queries and keys go through an RMSNorm in each head before the rotation, as in Qwen3."""
    output_bias: bool | None = None
    """True if W_O has a bias; None takes ``attention_bias``. In Qwen2 only W_Q, W_K and W_V have biases."""

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the fields that are None, and check all fields before they are used.

        Raises:
            InputError: a value is not one of those listed, or a name resembles the name of a field. transformers keeps
                unknown names silently, and the model would be built without the intended field.
        """
        known = [field.name for field in fields(self)]
        for name in kwargs.keys() - _OLD:
            if near := get_close_matches(name, known, n=1, cutoff=0.8):
                raise InputError(f"{name} is no field of HeadNormConfig; did you mean {near[0]}?")
        if self.output_bias is None:
            self.output_bias = self.attention_bias
        self._check_own_fields()
        super().__post_init__(**kwargs)

    def validate(self) -> None:
        """Check the fields; transformers calls this before it saves."""
        self._check_own_fields()
        super().validate()  # type: ignore[misc]  # huggingface_hub adds it to the class

    def _check_own_fields(self) -> None:
        if isinstance(self.num_attention_heads, int) and self.num_attention_heads < 1:
            raise InputError(f"num_attention_heads is {self.num_attention_heads}; need at least 1")
        known = {
            "attention": ATTENTIONS,
            "norm": NORMS,
            "value_norm": VALUE_NORMS,
            "value_norm_init": VALUE_NORM_INITS,
        }
        for field, values in known.items():
            if (given := getattr(self, field)) not in values:
                raise InputError(f"{field} is {given!r}; need one of {', '.join(values)}")
        if self.value_norm == "position" and self.attention == "sigmoid":
            raise InputError(
                "value_norm is 'position' and attention 'sigmoid', whose weights do not sum to 1; need an average to "
                "undo: another attention, or value_norm = 'shared'"
            )
        for field in ("qk_norm", "output_bias"):
            if not isinstance(getattr(self, field), bool):
                raise InputError(f"{field} is {getattr(self, field)!r}; need true or false")
        length = self.value_norm_length
        if length is not None and not (type(length) is int and length >= 1):
            raise InputError(
                f"value_norm_length is {length!r}; need a number of tokens, 1 or more, or None"
            )
        if not (isinstance(self.value_norm_eps, (int, float)) and self.value_norm_eps >= 0):
            raise InputError(f"value_norm_eps is {self.value_norm_eps!r}; need a number, 0 or more")
