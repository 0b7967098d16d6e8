"""Count the passes of a trace and the memory that it takes beside the model, without torch."""

from ..data.described import check_sequences_fit
from ..errors import InputError
from ..estimate import LIBRARIES, PassCount, PassCounts, Sizes
from ..models.memory import LOSS_CHUNK, free_bytes
from ..models.sized import Sized
from ..text import size_text
from .config import CONTROL_LENGTH, PATH_CONTROLS, PATH_LENGTH, TraceConfig

_PASSES_OF_LINKS, _PASSES_A_STEP = 32, 4
"""Whole passes over the interventions' sequences: for links, curve and placement (two more if the sink is not at
position 0), and for a step's mediation."""
_PASSES_OF_SETS, _PASSES_A_CONTROL, _CONTROLS_A_STEP = 20, 5, 15
"""The same over the controls' sequences: for random sets, for each draw of all links, and for a step's mediation."""
_CONTROLS_AGAIN = 0.1
"""The share of controls that are run on all positions too."""
_PASSES_WITHOUT = 4
"""The same that also a model without a sink takes, which is asked if one of its parts keeps a sink away."""
_PASSES_OF_MAKERS = 45
_PATHS, _PATHS_A_STEP, _CONTROLLED = 4, 16, 0.5
"""Paths, those that each step brings, and the share of them that has controls."""
_STREAMED, _STEPS = 2.0, 2
"""The measuring pass over a plain one, and growth steps, for what the headers do not tell."""
_TOKENS_READ, _TOKENS_EDITED = 2048, 512
"""Tokens of a forward that measures, and of one under edits, on a CPU."""
_POINTS, _PATTERNS = 11, 6
"""Points of the screen, which are in one forward with gradients, and copies of the baseline's pattern in it."""
_SITES_BY_POSITION = 4
_NOT_INCLUDED = "a second measuring pass if the first looked at the wrong position or some sequences lack the sink"
_LESS = "need fewer sequences, a smaller type (dtype='bfloat16') or no interventions (interventions=False)"


def count_trace_passes(config: TraceConfig, sizes: Sizes) -> PassCounts:
    """Count the forward passes of a trace by stage, and the tokens that each stage reads.

    Raises:
        InputError, ModelError, KernelError: what ``trace`` would refuse before it measures, as far as it is known.
    """
    header = sizes.header
    check_sequences_fit(config, n_context=header.n_context, has_tokenizer=header.has_tokenizer)
    sequences, length = len(config.prompts) or config.sequences, config.length
    tokens, scouted = sequences * length, min(sequences, 8) * min(length, 64)
    patterns = header.n_layers * header.n_heads * min(64, length) ** 2
    facts = {"disk": f"about {size_text(patterns + 8 * tokens + 2_000_000)}"}
    if sizes.lens is not None:
        from ..activations.attention import choose_kernel

        facts["kernel"] = choose_kernel(
            sizes.lens.family, device=sizes.lens.device, asked=config.kernel
        )
    parts = [
        PassCount(name="scout", tokens=scouted),
        PassCount(name="measure", tokens=tokens, slowness=_STREAMED),
    ]
    if header.has_tokenizer:
        parts.append(PassCount(name="the other BOS condition", tokens=scouted + tokens))
    if config.random_init:
        parts.append(PassCount(name="random-init baseline", tokens=tokens, slowness=_STREAMED))
    if config.interventions:
        few = min(config.intervention_sequences, sequences)
        short = min(config.intervention_length, length)
        fewer = min(config.most_control_sequences, few)
        of_controls = _PASSES_OF_SETS + _PASSES_A_CONTROL * config.controls
        of_controls += _CONTROLS_A_STEP * _STEPS
        cut = min(1.0, CONTROL_LENGTH / short + _CONTROLS_AGAIN)
        number = few * (_PASSES_OF_LINKS + _PASSES_A_STEP * _STEPS)
        number += round(fewer * of_controls * cut)
        number += min(config.most_choosing_sequences, sequences) * _PASSES_OF_MAKERS
        of_paths = (few + _CONTROLLED * PATH_CONTROLS * fewer) * (_PATHS + _PATHS_A_STEP * _STEPS)
        number += round(min(1.0, PATH_LENGTH / short) * of_paths)
        parts.append(
            PassCount(name="without an intervention", forwards=_PASSES_WITHOUT * few, tokens=short)
        )
        parts.append(
            PassCount(
                name="interventions", forwards=number, tokens=short, only_if="the model has a sink"
            )
        )
        facts["interventions"] = f"with {_STEPS} growth steps"
    weights = header.weight_bytes(config.dtype)
    twin = weights * config.random_init
    together = bytes_beside_model(header, config, twin=twin)
    one_by_one = config.random_init and LIBRARIES + weights + together > free_bytes()
    said = ", one model after the other" if one_by_one else " with the random-init baseline"
    return PassCounts(
        parts=tuple(parts),
        sequences=sequences,
        positions=length,
        bytes=bytes_beside_model(header, config) if one_by_one else together,
        twin=0 if one_by_one else twin,
        facts=facts,
        apart=_NOT_INCLUDED,
        memory=said if config.random_init else "",
        refusal=_LESS,
    )


def bytes_beside_model(model: Sized, config: TraceConfig, *, twin: int = 0) -> int:
    """Estimate the peak memory that a trace on the CPU takes beside libraries and the model.

    ``twin`` are the bytes of a random-init baseline.
    """
    sequences = len(config.prompts) or config.sequences
    tokens = sequences * config.length
    heads = model.n_heads * model.d_head
    keys = model.n_kv_heads * model.d_head
    a_layer = 4 * (10 * model.d_model + 4 * model.d_mlp + 6 * heads)
    logits = 4 * LOSS_CHUNK * model.d_vocab
    panel = 4 * _STEPS * tokens * (model.d_mlp + model.d_model)
    sums = 16 * _SITES_BY_POSITION * model.n_layers * min(64, config.length) * model.d_model
    measuring = (
        sums + max(a_layer * min(tokens, _TOKENS_READ), logits) + (1 + config.random_init) * panel
    )
    if not config.interventions:
        return twin + measuring
    few = min(config.intervention_sequences, sequences)
    short = min(config.intervention_length, config.length)
    chosen, a_value = min(config.most_choosing_sequences, sequences), 4 * short * model.n_layers
    kept = a_value * few * (6 * model.d_model + 3 * keys + 2 * heads + model.d_mlp)
    pattern = 16 * model.n_heads * _TOKENS_EDITED * short
    edited = kept + max(
        a_layer * _TOKENS_EDITED + pattern, logits
    )  # few sequences share a forward with other cells
    kept = a_value * (
        few * model.d_model + chosen * (3 * model.d_model + 2 * keys + heads + model.d_mlp)
    )
    of_points = _POINTS * (
        4 * keys + _PATTERNS * model.n_heads
    )  # their keys and values, and one column
    screened = kept + 4 * chosen * short * (_PATTERNS * model.n_heads * short + of_points)
    return max(twin + measuring, panel + max(screened, edited))


def check_trace_fits_memory(model: Sized, config: TraceConfig) -> None:
    """Check that a trace fits into main memory beside the model.

    Raises:
        InputError: it does not fit, even if the random-init baseline takes the model's place.
    """
    needed, free = bytes_beside_model(model, config), free_bytes()
    if needed > free:
        raise InputError(
            f"the trace takes about {size_text(needed)} beside the model and {size_text(free)} are free; {_LESS}"
        )
