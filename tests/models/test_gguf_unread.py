"""What transformers leaves out of a GGUF file: the model is that of the file all the same, or it is refused."""

import gguf
import numpy as np
import pytest
import torch
from einops import rearrange
from gguf_files import write_dense, write_gguf, written
from rounding import assert_rows_close
from transformers import LlamaConfig, LlamaForCausalLM

from sink_lens.errors import ModelError
from sink_lens.models.gguf_conversion import read_gguf_tokenizer
from sink_lens.models.gguf_header import HeaderReader
from sink_lens.models.load import load

SCALED = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}  # fmt: skip


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SINK_LENS_CACHE", str(tmp_path / "cache"))


def llama(rope):
    config = LlamaConfig(
        vocab_size=96, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, max_position_embeddings=1024, rms_norm_eps=1e-5, initializer_range=0.2,
        rope_parameters={"rope_theta": 500_000.0} | rope,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config).eval()


def factors(context):
    """What llama.cpp's converter writes for Llama 3's scaling."""
    found = []
    for frequency in 500_000.0 ** -(np.arange(0, 16, 2) / 16):
        length = 2 * np.pi / frequency
        smooth = np.clip((context / length - 1) / 3, 0, 1)
        found.append(1 / ((1 - smooth) / 8 + smooth))
    return np.array(found, dtype=np.float32)


def gguf_of(model, path, *, frequencies=None, scaling=(), biases=False, context=None):
    """The model as llama.cpp writes it."""

    writer = gguf.GGUFWriter(path, "llama")
    sizes = {
        "name": "tiny", "vocab_size": 96, "context_length": 1024, "embedding_length": 64, "block_count": 2,
        "feed_forward_length": 96, "head_count": 4, "head_count_kv": 2, "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 500_000.0,
    }  # fmt: skip
    for name, size in sizes.items():
        getattr(writer, f"add_{name}")(size)
    if scaling:
        writer.add_rope_scaling_type(scaling[0])
        writer.add_rope_scaling_factor(scaling[1])
    if context is not None:
        writer.add_rope_scaling_orig_ctx_len(context)
    if frequencies is not None:
        writer.add_tensor("rope_freqs.weight", frequencies)
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    ends = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, own in ends.items():
        writer.add_tensor(f"{own}.weight", weights[f"{name}.weight"])
    for layer in range(2):
        for name, own in NAMES.items():
            weight = weights[f"model.layers.{layer}.{name}.weight"]
            if heads := {"attn_q": 4, "attn_k": 2}.get(own):
                weight = rearrange(
                    weight, "(head half pair) d -> (head pair half) d", head=heads, half=2
                )
            writer.add_tensor(f"blk.{layer}.{own}.weight", np.ascontiguousarray(weight))
            if biases and own == "attn_q":
                writer.add_tensor(f"blk.{layer}.{own}.bias", np.ones(64, dtype=np.float32))
    return written(writer, path)


CASES = {
    "none": ({"rope_type": "default"}, {}),
    "ones": ({"rope_type": "default"}, {"frequencies": np.ones(8, dtype=np.float32)}),
    "llama3": (SCALED | {"original_max_position_embeddings": 8192}, {"frequencies": factors(8192)}),
    "context": (
        SCALED | {"original_max_position_embeddings": 64},
        {"frequencies": factors(64), "context": 64},
    ),
    "linear": (
        {"rope_type": "linear", "factor": 4.0},
        {"scaling": (gguf.RopeScalingType.LINEAR, 4.0)},
    ),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_scaled_rotations_are_those_of_the_file(case, tmp_path):
    rope, said = CASES[case]
    model = llama(rope)
    lens = load(gguf_of(model, tmp_path / "model.gguf", **said))
    tokens = torch.randint(0, 96, (1, 200), generator=torch.Generator().manual_seed(0))
    assert_rows_close(lens.plain(tokens).logits, model(tokens).logits)


@torch.no_grad()
def test_gemma_3_scales_its_layers_without_a_window_alone(tmp_path):
    lens = load(write_dense(tmp_path / "scaled.gguf", "gemma3", stored="F32", linear=8.0))
    found = lens.config.rope_parameters
    assert (found["full_attention"]["rope_type"], found["full_attention"]["factor"]) == (
        "linear",
        8.0,
    )
    assert found["sliding_attention"]["rope_type"] == "default"
    other = load(write_dense(tmp_path / "plain.gguf", "gemma3", stored="F32"))
    assert other.config.rope_parameters["full_attention"]["rope_type"] == "default"


@pytest.mark.parametrize(
    ("architecture", "said", "expected"),
    [
        ("gemma2", {"attn_logit_softcapping": 20.0}, {"attn_logit_softcapping": 20}),
        ("gemma2", {"final_logit_softcapping": 10.0}, {"final_logit_softcapping": 10}),
        ("gemma2", {"attention.sliding_window": 8}, {"sliding_window": 8}),
        ("gemma2", {"attention.key_length": 16}, {"head_dim": 16, "query_pre_attn_scalar": 16}),
        (
            "phi3",
            {"attention.sliding_window": 8, "rope.dimension_count": 8},
            {"sliding_window": 8, "share": 0.5},
        ),
        ("phi3", {"attention.sliding_window": 0}, {"sliding_window": None}),  # Phi-4 has none
        ("llama", {"rope.dimension_count": 32}, {"head_dim": 32}),
        ("gemma2", {"rope.freq_base": 100_000.0}, {"theta": 100_000}),
    ],
)
def test_settings_of_the_file_win_over_the_defaults_of_the_class(
    architecture, said, expected, tmp_path
):
    lens = load(write_dense(tmp_path / "model.gguf", architecture, stored="F32", said=said))
    rope = lens.config.rope_parameters
    found = {"theta": rope["rope_theta"], "share": rope.get("partial_rotary_factor")}
    assert {
        name: found[name] if name in found else getattr(lens.config, name) for name in expected
    } == expected


@torch.no_grad()
def test_a_part_of_each_head_is_rotated_where_the_file_says_so(tmp_path):
    files = {part: {} if part is None else {"rope.dimension_count": part} for part in (None, 16, 8)}
    tokens = torch.randint(0, 96, (1, 20), generator=torch.Generator().manual_seed(0))
    logits = {}
    for part, said in files.items():
        lens = load(write_dense(tmp_path / f"{part}.gguf", "phi3", stored="F32", said=said))
        logits[part] = lens.plain(tokens).logits
    torch.testing.assert_close(
        logits[16], logits[None], rtol=1e-5, atol=1e-5
    )  # the heads are that wide
    assert (logits[8] - logits[None]).abs().max() > 0.1
    with pytest.raises(ModelError, match="rotates 50% of each head, which is not read"):
        load(
            write_dense(
                tmp_path / "gemma2.gguf", "gemma2", stored="F32", said={"rope.dimension_count": 8}
            )
        )


@pytest.mark.parametrize(
    ("said", "text"),
    [
        (
            {"frequencies": factors(64)},
            "factors that are not those of Llama 3 for a context of 8,192",
        ),
        ({"scaling": (gguf.RopeScalingType.YARN, 4.0)}, "scales its rotary positions .yarn."),
        ({"biases": True}, "has biases such as blk.0.attn_q.bias"),
    ],
)
def test_what_is_not_read_is_refused(said, text, tmp_path):
    with pytest.raises(ModelError, match=text):
        load(gguf_of(llama({"rope_type": "default"}), tmp_path / "model.gguf", **said))
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_llama_3_begins_with_bos_where_its_file_does_not_say(tmp_path):
    adds = {}
    for pre in ("llama-bpe", "gpt-2"):
        tokenizer = read_gguf_tokenizer(write_gguf(tmp_path / f"{pre}.gguf", pre=pre))
        adds[pre] = tokenizer("hel")["input_ids"][0] == tokenizer.bos_token_id
    assert adds == {"llama-bpe": True, "gpt-2": False}


# --- the header of a GGUF file is read without its lists, and is otherwise what the library reads


def test_lists_are_stepped_over_and_everything_else_is_what_the_library_reads(tmp_path):
    path = write_gguf(tmp_path / "tiny.gguf")
    ours, theirs = HeaderReader(path), gguf.GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    lists = {
        name for name, field in theirs.fields.items() if field.types[0] == gguf.GGUFValueType.ARRAY
    }
    assert {"tokenizer.ggml.tokens", "tokenizer.ggml.token_type", "tokenizer.ggml.merges"} <= lists
    for name, field in theirs.fields.items():
        assert ours.fields[name].contents() == ([] if name in lists else field.contents())
    assert ours.data_offset == theirs.data_offset
    assert [(one.name, one.data_offset, one.n_bytes) for one in ours.tensors] == [
        (one.name, one.data_offset, one.n_bytes) for one in theirs.tensors
    ]
