"""Tiny GGUF files: one with a tokenizer, and one of each dense architecture."""

import gguf
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations import GGUF_CONFIG_MAPPING
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

WIDTH, HEADS, KV_HEADS, NEURONS, LAYERS = 16, 2, 1, 24, 2
# The 256 byte tokens of GPT-2's alphabet, two merges, and an end mark.
VOCABULARY = [chr(code) if 33 <= code < 127 else chr(256 + code) for code in range(256)] + [
    "he",
    "hel",
    "<e>",
]


def write_gguf(path, *, seed=0, split=1, architecture="llama", skip=(), tokenizer=True, pre=None):
    """A Llama with random weights, as a GGUF file of some 60 kB."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    sizes = {
        "vocab_size": len(VOCABULARY),
        "context_length": 32,
        "embedding_length": WIDTH,
        "block_count": LAYERS,
    }
    sizes |= {"feed_forward_length": NEURONS, "head_count": HEADS, "head_count_kv": KV_HEADS}
    for key, value in (sizes | {"layer_norm_rms_eps": 1e-5, "rope_freq_base": 10_000.0}).items():
        getattr(writer, f"add_{key}")(value)
    if split > 1:
        writer.add_uint16("split.count", split)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        writer.add_token_list(VOCABULARY)
        writer.add_token_types([gguf.TokenType.NORMAL] * 258 + [gguf.TokenType.CONTROL])
        writer.add_token_merges(["h e", "he l"])
        writer.add_bos_token_id(258)
        writer.add_eos_token_id(258)
    kv_width = WIDTH // HEADS * KV_HEADS
    shapes = {"token_embd": (len(VOCABULARY), WIDTH), "output_norm": (WIDTH,)}
    for layer in range(LAYERS):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_q": (WIDTH, WIDTH), "attn_k": (kv_width, WIDTH), "attn_v": (kv_width, WIDTH),
                "attn_output": (WIDTH, WIDTH), "ffn_gate": (NEURONS, WIDTH), "ffn_up": (NEURONS, WIDTH),
                "ffn_down": (WIDTH, NEURONS), "attn_norm": (WIDTH,), "ffn_norm": (WIDTH,),
            }.items()
        }  # fmt: skip
    for name, shape in shapes.items():
        if name not in skip:
            writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    return written(writer, path)


def written(writer, path):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SIZES = {
    ("num_hidden_layers", "n_layer"): 2,
    ("hidden_size", "n_embd"): 64,
    ("num_attention_heads", "n_head"): 4,
    ("num_key_value_heads",): 2,
    ("head_dim",): 16,
    ("intermediate_size",): 96,
    ("max_position_embeddings", "n_ctx"): 32,
    ("vocab_size",): 96,
    ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon"): 1e-5,
    ("rope_theta",): 10_000.0,
    ("sliding_window",): 16,
}
"""What configurations call a size -> its value in ``write_dense``."""


def write_dense(path, architecture, *, stored, tied=True, seed=0, linear=None, said=()):
    """A dense model of any architecture with random weights in a quantised type, or as floats.

    Its names and shapes are those that transformers looks for; ``linear`` is the factor of its positions' scaling, and
    ``said`` are further settings of the header, by their names without that of the architecture.
    """
    values = {name: value for names, value in SIZES.items() for name in names}
    named = GGUF_CONFIG_MAPPING[architecture]

    def head():
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_name("tiny")
        writer.add_token_list([str(number) for number in range(96)])
        writer.add_pad_token_id(0)
        if linear is not None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(linear)
        settings = {key: values[name] for key, name in named.items() if name in values} | dict(said)
        for key, value in settings.items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
            add(f"{architecture}.{key}", value)
        if not tied:
            add_tensor(writer, "output.weight", (96, 64))
        return writer

    rng = np.random.default_rng(seed)

    def add_tensor(writer, name, shape):
        found = rng.standard_normal(shape).astype(np.float32)
        if len(shape) > 1 and stored != "F32":  # norms and biases are never quantised
            kind = gguf.GGMLQuantizationType[stored]
            writer.add_tensor(name, gguf.quantize(found, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, found)

    written(head(), path)  # without weights: what transformers makes of it says which it needs
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config.to_dict())
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters()}
    writer = head()
    for name, held in sorted(get_gguf_hf_weights_map(model, processor).items()):
        if held in shapes and name != "output.weight":
            turned = architecture == "gpt2" and name.startswith("blk") and len(shapes[held]) > 1
            add_tensor(writer, name, shapes[held][::-1] if turned else shapes[held])
    return written(writer, path)
