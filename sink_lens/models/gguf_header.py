"""The header of a GGUF file without its lists, and the check that a file is one.

The library's reader makes two arrays of each token and each merge of the tokenizer: twelve seconds for a vocabulary of
152,000, in every dry run.
"""

import math
import struct
from pathlib import Path
from typing import Any

from gguf import GGUFEndian, GGUFReader, GGUFValueType

from ..errors import ModelError, first_line_of_error
from ..files import check_regular_file
from .header import Header

_MAGIC = b"GGUF"
_OF_GGUF = {
    "gemma2": "Gemma2ForCausalLM",
    "gemma3": "Gemma3ForCausalLM",
    "llama": "LlamaForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
"""Name of an architecture in GGUF files -> its class. Mistral is a llama there. Files of others are refused."""


class HeaderReader(GGUFReader):
    """A GGUF reader that skips the contents of lists, such as the vocabulary."""

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[Any], list[int], list[Any]]:
        """Return a field's size in bytes, its parts, the indices of those that hold data, and its types."""
        if GGUFValueType(raw_type) != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        order, held = ">" if self.endianess == GGUFEndian.BIG else "<", self.data.data  # memoryview
        kind, count = struct.unpack_from(f"{order}IQ", held, orig_offs)
        end = orig_offs + 12
        if (scalar := self.gguf_scalar_to_np.get(GGUFValueType(kind))) is not None:
            end += count * scalar().itemsize
        elif GGUFValueType(kind) == GGUFValueType.STRING:
            length = struct.Struct(f"{order}Q")
            for _ in range(count):
                end += length.size + length.unpack_from(held, end)[0]
        else:
            for _ in range(count):
                end += self._get_field_parts(end, kind)[0]
        return end - orig_offs, [], [], [GGUFValueType.ARRAY, GGUFValueType(kind)]


def check_is_gguf(gguf: Path) -> None:
    check_regular_file(gguf, what="the GGUF file")
    if not gguf.is_file():
        raise ModelError(
            f"there is no file {gguf}; need a GGUF file. Check the path, or fetch it again"
        )
    try:
        with gguf.open("rb") as stream:
            found = stream.read(len(_MAGIC))
    except OSError as error:
        raise ModelError(
            f"{gguf} cannot be read ({error.strerror}); need a readable file. Check its permissions"
        ) from error
    if found != _MAGIC:
        raise ModelError(
            f"{gguf} begins with {found!r}; a GGUF file begins with {_MAGIC!r}. "
            "It is another format or damaged: fetch it again"
        )


def metadata_value(reader: GGUFReader, name: str) -> Any:
    found = reader.get_field(name)
    return None if found is None else found.contents()


def read_gguf_header(gguf: Path) -> Header:
    """Read a model's sizes from the header of its GGUF file.

    Raises:
        ModelError: the file is damaged, is one part of a split file, or has an unsupported architecture.
    """
    try:
        reader = HeaderReader(gguf)
        sizes = {str(tensor.name): [int(one) for one in tensor.shape] for tensor in reader.tensors}
        elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
        kind = metadata_value(reader, "general.architecture") or ""
        parts = metadata_value(reader, "split.count") or 1
        n_layers, n_heads, n_kv_heads, d_head, d_mlp, n_context = (
            metadata_value(reader, f"{kind}.{name}")
            for name in (
                "block_count",
                "attention.head_count",
                "attention.head_count_kv",
                "attention.key_length",
                "feed_forward_length",
                "context_length",
            )
        )
        n_experts = metadata_value(reader, f"{kind}.expert_count") or 0
        has_tokenizer = reader.get_field("tokenizer.ggml.model") is not None
    except Exception as error:  # the reader does not check the file
        raise ModelError(
            f"{gguf.name} begins as a GGUF file and cannot be read to its end ({first_line_of_error(error)}); "
            f"found {gguf.stat().st_size:,} bytes. It is damaged or cut short: fetch it again"
        ) from error
    if parts > 1:
        raise ModelError(
            f"{gguf.name} is one of {parts} parts; need one file. Join them: llama-gguf-split --merge"
        )
    if kind not in _OF_GGUF or n_experts:
        experts = " with experts" if n_experts else ""
        raise ModelError(
            f"{gguf.name} holds a model of the architecture {kind!r}{experts}, which is not read from GGUF; need one "
            f"of {', '.join(_OF_GGUF)}, without experts. Load the safetensors folder of the same model"
        )
    shape = sizes.get("token_embd.weight", [0, 0])
    ends = [math.prod(sizes.get(name, [0])) for name in ("token_embd.weight", "output.weight")]
    heads = n_heads if isinstance(n_heads, int) else 0
    return Header(
        n_layers=n_layers or 0,
        n_heads=heads,
        n_kv_heads=n_kv_heads if isinstance(n_kv_heads, int) else heads,
        d_model=shape[0],
        d_head=d_head or shape[0] // max(1, heads),
        d_mlp=d_mlp if isinstance(d_mlp, int) else 0,
        n_context=n_context,
        n_body=elements - sum(ends),
        n_vocab=math.prod(shape),
        n_weights=elements,
        d_vocab=shape[-1],
        has_tokenizer=has_tokenizer,
        architecture=_OF_GGUF[kind],
    )
