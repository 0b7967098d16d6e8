"""The header of a GGUF file is read without its lists, and is otherwise what the library reads."""

import gguf
from gguf_files import write_gguf

from sink_lens.models.gguf_header import HeaderReader


def test_lists_are_stepped_over_and_everything_else_is_what_the_library_reads(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    ours, theirs = HeaderReader(path), gguf.GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    lists = {name for name, field in theirs.fields.items() if field.types[0] == gguf.GGUFValueType.ARRAY}
    assert {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"} <= lists
    for name, field in theirs.fields.items():
        assert ours.fields[name].contents() == ([] if name in lists else field.contents())
    assert ours.data_offset == theirs.data_offset
    assert [(one.name, one.data_offset, one.n_bytes) for one in ours.tensors] == [
        (one.name, one.data_offset, one.n_bytes) for one in theirs.tensors
    ]


def test_a_nested_list_is_stepped_over(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "nested.gguf", "llama")
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_uint32("after", 7)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert HeaderReader(tmp_path / "nested.gguf").get_field("after").contents() == 7
