"""The weights of a GGUF file as those of a transformers model, written tensor by tensor.

Transformers reads a GGUF file into memory whole, twice at its peak. Here its names and its operations on each tensor
are taken alone: a tensor is dequantised, written and forgotten, so that no more is in memory than the largest tensor
and the file. What is written is equal, byte for byte, to what ``save_pretrained`` writes of the model.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from ..errors import ModelError

_WEIGHTS_FILE = "model.safetensors"
_ROWS = 4096
"""Rows of a tensor that are dequantised at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufWeights:
    """The tensors of a GGUF file, each the source of one tensor of a model."""

    model: PreTrainedModel
    """Without weights."""
    tensors: dict[str, Any]
    """Name in the model -> tensor in the file, not read yet."""
    processor: TensorProcessor

    @classmethod
    def of(cls, file: Path, *, source: dict[str, Any], folder: Path) -> "GgufWeights":
        """Pair each of a model's tensors with the tensor of a GGUF file that it is read from.

        Args:
            file: the GGUF file.
            source: how transformers is told of the file.
            folder: an empty folder.

        Raises:
            ModelError: a tensor is missing or of another size, or the file has biases that the model has not.
        """
        config = AutoConfig.from_pretrained(folder, **source)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        held = gguf.GGUFReader(str(file))  # a text, as transformers has it: see convert
        architecture = held.fields["general.architecture"].contents()
        made = TENSOR_PROCESSORS.get(architecture, TensorProcessor)
        processor = made(config=load_gguf_checkpoint(str(file))["config"])
        names = get_gguf_hf_weights_map(model, processor)
        tensors = {names[one.name]: one for one in held.tensors if one.name in names}
        sizes = {name: int(one.n_elements) for name, one in tensors.items()}
        for name, shape in _saved_shapes(model).items():
            if sizes.get(name) != math.prod(shape):
                held_of_it = f"{sizes[name]:,} numbers" if name in sizes else "nothing"
                raise ModelError(
                    f"{file.name} has {held_of_it} for {name}; need {math.prod(shape):,}. It is damaged or another "
                    "model's: fetch it again, or load the safetensors folder of the same model"
                )
        unread = [one.name for one in held.tensors if one.name not in names and one.name.endswith(".bias")]
        if unread:
            raise ModelError(
                f"{file.name} has biases such as {unread[0]}, which its architecture does not have. "
                "Load the safetensors folder of the same model"
            )
        return cls(model=model, tensors=tensors, processor=processor)

    def save(self, folder: Path) -> None:
        """Write config.json, the settings of generation and the weights in float32.

        Raises:
            OSError: the disk is full.
            ValueError: a tensor has another shape than the model's.
        """
        config = self.model.config
        config.architectures, config.dtype = [type(self.model).__name__], "float32"
        config.save_pretrained(folder)
        if self.model.can_generate() and self.model.generation_config is not None:
            self.model.generation_config.save_pretrained(folder)
        shapes = dict(sorted(_saved_shapes(self.model).items()))
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, shape in shapes.items():
            begin, end = end, end + math.prod(shape) * 4
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
        said = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        said += b" " * (-len(said) % 8)
        with (folder / _WEIGHTS_FILE).open("wb") as file:
            file.write(len(said).to_bytes(8, "little") + said)
            for name, shape in shapes.items():
                file.write(self._read(name, shape=shape).data)

    def _read(self, name: str, *, shape: tuple[int, ...]) -> np.ndarray:
        """A tensor of the file in float32, in the model's layout."""
        held = self.tensors[name]
        values = np.empty([int(size) for size in reversed(held.shape)], dtype="<f4")
        for begin in range(0, len(values), _ROWS):  # gguf itself has all rows twice
            rows = slice(begin, begin + _ROWS)
            values[rows] = gguf.dequantize(held.data[rows], held.tensor_type)
        # GPT-2's processor puts its unembedding into the second table too
        processed = self.processor.process(weights=values, name=held.name, parsed_parameters={"tensors": {}})
        found = np.ascontiguousarray(processed.weights, dtype="<f4")
        if found.shape != shape:
            raise ValueError(f"{held.name} has the shape {found.shape}; {name} needs {shape}")
        return found


def _saved_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that ``save_pretrained`` would write of a model; of tied tensors only one."""
    tied = model.all_tied_weights_keys
    return {name: tuple(one.shape) for name, one in model.state_dict().items() if name not in tied}
