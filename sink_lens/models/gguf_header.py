"""The header of a GGUF file without its lists.

The library's reader makes two arrays of each token and each merge of the tokenizer: twelve seconds for a vocabulary of
152,000, in every dry run. Nothing of a list is a size of the model.
"""

import struct
from typing import Any

from gguf import GGUFEndian, GGUFReader, GGUFValueType


class HeaderReader(GGUFReader):
    """Reads tensors and fields as the library does, and steps over lists; their contents are empty."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
        """The base reader's (size, parts, indices of data, types) of a field; a list's contents are skipped."""
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


def metadata_value(reader: GGUFReader, name: str) -> Any:
    """A value of a file's metadata, by its name; None where the file has none of this name."""
    found = reader.get_field(name)
    return None if found is None else found.contents()
