"""The architectures that transformers and TransformerLens both have, and what this package does with each.

``python tools/architectures.py`` prints a table; a name with neither a row nor a reason was not looked at.
"""

from transformer_lens.factories.architecture_adapter_factory import SUPPORTED_ARCHITECTURES
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sink_lens.models.families import FAMILIES, LEFT_OUT

OTHER_SPELLING = {"PhiMoEForCausalLM": "PhimoeForCausalLM"}
"""Adapter of TransformerLens -> class of transformers."""
NO_TEXT_DECODER = {
    "BertLMHeadModel": "an encoder",
    "Gemma3ForConditionalGeneration": "reads images too; its language model is a row",
    "Gemma4ForConditionalGeneration": "reads images too; its language model is a row",
    "Gemma4UnifiedForConditionalGeneration": "reads images too",
}
NOT_LOOKED_AT = "not looked at"


def in_both() -> list[str]:
    """Class names of transformers' causal language models for which TransformerLens has an adapter."""
    classes = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    names = {one for each in classes for one in ([each] if isinstance(each, str) else each)}
    adapters = {OTHER_SPELLING.get(name, name) for name in SUPPORTED_ARCHITECTURES}
    return sorted((names & adapters) | {"Gemma3nForConditionalGeneration"})


def state_of(name: str) -> str:
    """``full``, or why the architecture is refused."""
    if name in NO_TEXT_DECODER:
        return NO_TEXT_DECODER[name]
    if name in FAMILIES:
        row = FAMILIES[name]
        if row.mixer is not None:
            return "hybrid: no circuits"
        return "no neurons: no chain" if row.experts is row.down is None else "full"
    return f"refused: {LEFT_OUT[name]}" if name in LEFT_OUT else NOT_LOOKED_AT


def table() -> str:
    """The table, and how many of each state there are."""
    states = {name: state_of(name) for name in in_both()}
    counted = {name: state for name, state in states.items() if name not in NO_TEXT_DECODER}
    words = [state.partition(":")[0] for state in counted.values()]
    numbers = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(sorted(words)))
    rows = [f"| `{name}` | {state} |" for name, state in states.items()]
    return "\n".join(
        [f"{len(counted)} text decoders: {numbers}.", "", "| | |", "| --- | --- |", *rows]
    )


if __name__ == "__main__":
    print(table())
