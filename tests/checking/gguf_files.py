"""A tiny GGUF file with a tokenizer."""

import gguf
import numpy as np

WIDTH, HEADS, KV_HEADS, NEURONS, LAYERS = 16, 2, 1, 24, 2
# The 256 byte tokens of GPT-2's alphabet, two merges, and an end mark.
VOCABULARY = [chr(code) if 33 <= code < 127 else chr(256 + code) for code in range(256)] + [
    "he",
    "hel",
    "<e>",
]


def write_gguf(path, *, seed=0, split=1, architecture="llama", skip=(), tokenizer=True):
    """A Llama with random weights, as a GGUF file of some 60 kB."""
    rng = np.random.default_rng(seed)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("tiny")
    writer.add_vocab_size(len(VOCABULARY))
    writer.add_context_length(32)
    writer.add_embedding_length(WIDTH)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(NEURONS)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    if split > 1:
        writer.add_uint16("split.count", split)
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
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
                "attn_q": (WIDTH, WIDTH),
                "attn_k": (kv_width, WIDTH),
                "attn_v": (kv_width, WIDTH),
                "attn_output": (WIDTH, WIDTH),
                "ffn_gate": (NEURONS, WIDTH),
                "ffn_up": (NEURONS, WIDTH),
                "ffn_down": (WIDTH, NEURONS),
                "attn_norm": (WIDTH,),
                "ffn_norm": (WIDTH,),
            }.items()
        }
    for name, shape in shapes.items():
        if name not in skip:
            writer.add_tensor(f"{name}.weight", rng.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
