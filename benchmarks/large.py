"""``trace --quick``, ``card`` and ``circuit`` of models of 0.5 and 1.5 billion parameters, beside their dry runs.

    python benchmarks/large.py                          # 0.5B as safetensors and GGUF: an hour and more on one core
    python benchmarks/large.py --shape qwen2-1.5b --form gguf --command card

Sizes are those of Qwen2 0.5B and 1.5B with their vocabulary of 151,936, as a Qwen2 or as a Llama, which has no biases.
Weights are random, in bfloat16 (safetensors) or Q8_0 (GGUF), but for a sink that is written into them: a neuron of
layer 2 writes a dimension of the first token that all later keys read, so that nothing of a trace is left out. Each
command is a process of its own, on one thread.

Times are the processor's, so that other programs on the machine count little: what a dry run says with the speed of
products measured in processor time, before and after the command, beside what the command took. Memory is the largest
resident set. ``of`` is measured over said. ``convert`` is the first command on a GGUF file, ``tokens`` of one sequence.
"""

import argparse
import contextlib
import os
import re
import sys
import tempfile
import time
import timeit
from pathlib import Path
from unittest import mock

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TQDM_DISABLE": "1",
    "MPLBACKEND": "agg",
    "COLUMNS": "200",
}

import gguf
import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen2Config
from typer.testing import CliRunner

from sink_lens import estimate
from sink_lens.cli import app
from sink_lens.models.tiny import BOS_ID, tiny_tokenizer

HALF = {
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
}
ONE_AND_A_HALF = {
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
}
FAMILIES = {"qwen2": Qwen2Config, "llama": LlamaConfig}
SIZES = {"0.5b": HALF, "1.5b": ONE_AND_A_HALF}
SHAPES = {
    f"{family}-{size}": (FAMILIES[family], SIZES[size]) for family in FAMILIES for size in SIZES
}
VOCABULARY, BOS_OF_GGUF = 151_936, 258
CIRCUIT = [
    "circuit",
    "--task",
    "text",
    "--pairs",
    "4",
    "--length",
    "32",
    "--method",
    "gim",
    "--sizes",
    "0.01,0.1,1",
]
CIRCUIT += ["--random", "1", "--check", "0"]  # a forward per node is an hour
COMMANDS = {
    "convert": ["tokens", "--sequences", "1", "--length", "16"],
    "card": ["card"],
    "trace": ["trace", "--quick"],
    "circuit": CIRCUIT,
}
SLOWER = 1e4
"""Dry runs are made with a processor that is slower by this factor, so that they say hours with many digits."""


def main() -> None:
    """Write each model, run the commands and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=SHAPES, action="append", help="default: qwen2-0.5b")
    parser.add_argument(
        "--form", choices=("safetensors", "gguf"), action="append", help="default: both"
    )
    parser.add_argument("--command", choices=COMMANDS, action="append", help="default: all")
    parser.add_argument(
        "--folder", type=Path, help="where models and runs are kept (default: a temporary folder)"
    )
    options = parser.parse_args()
    print(
        "| model | file | command | said | processor time | of | wall time | said | peak | of | load |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        os.environ["SINK_LENS_CACHE"] = str(folder / "cache")
        for shape in options.shape or ["qwen2-0.5b"]:
            for form in options.form or ("safetensors", "gguf"):
                model = write(shape, form, folder=folder)
                for command in options.command or COMMANDS:
                    if command != "convert" or form == "gguf":
                        row = row_of(command, model, out=folder / f"{shape}-{form}-{command}")
                        print(f"| {shape} | {form} | {command} | {row} |", flush=True)


def row_of(command: str, model: Path, *, out: Path) -> str:
    """Run a command in a process of its own, between two dry runs; return its row of the table."""
    name, *given = COMMANDS[command]
    arguments = [name, str(model), *given]
    said = [dry_run(arguments)]
    began, child = time.monotonic(), os.fork()
    if child == 0:
        log = (out.parent / f"{out.name}.log").open("w")
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        started = [sys.executable, "-c", "from sink_lens.cli import app; app()"]
        os.execv(sys.executable, [*started, *arguments, "--out", str(out), "--overwrite"])
    _, status, used = os.wait4(child, 0)
    wall, load = time.monotonic() - began, os.getloadavg()[0]
    if status:
        return f"ended with {os.waitstatus_to_exitcode(status)}"
    said.append(dry_run(arguments))
    likely, memory = np.mean(
        said if command != "convert" else said[:1], axis=0
    )  # it was converted after that
    seconds, peak = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9
    return (
        f"{likely:,.0f} s | {seconds:,.0f} s | {seconds / likely:.2f} | {wall:,.0f} s | {memory:.1f} GB | "
        f"{peak:.1f} GB | {peak / memory:.2f} | {load:.1f}"
    )


def dry_run(arguments: list[str]) -> tuple[float, float]:
    """Make a dry run; return the seconds of processor time, and the memory in GB, that it says."""
    with mock.patch.object(estimate, "measure_operations_per_second", slow_operations):
        said = CliRunner().invoke(app, [*arguments, "--dry-run"], catch_exceptions=False).output
    hours = [
        float(found)
        for found in re.findall(r"^(?:time|before)\b.*?([\d.]+) h\b", said, re.MULTILINE)
    ]
    (memory,) = re.findall(r"memory\W+(?:about )?([\d.]+) GB", said)
    return sum(hours) * 3600 / SLOWER, float(memory)


def slow_operations(*, rows: int = 512, width: int = 2048) -> float:
    """Measure ``estimate.measure_operations_per_second`` in processor time, and return it divided by SLOWER."""
    a, b = np.ones((rows, width), dtype=np.float32), np.ones((width, width), dtype=np.float32)
    fastest = min(timeit.repeat(lambda: a @ b, number=1, repeat=9, timer=time.process_time)[1:])
    return 2 * rows * width**2 / fastest / SLOWER


def write(shape: str, form: str, *, folder: Path) -> Path:
    """Write a model, unless it is there; return its folder or file."""
    path = folder / (f"{shape}.gguf" if form == "gguf" else shape)
    if path.exists():
        return path
    family, sizes = SHAPES[shape]
    config = family(**sizes, num_key_value_heads=2, vocab_size=VOCABULARY, tie_word_embeddings=True)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    plant(model, bos=BOS_OF_GGUF if form == "gguf" else BOS_ID)
    if form == "gguf":
        write_gguf(model, path=path)
    else:
        model.save_pretrained(path)
        tiny_tokenizer(adds_bos=True).save_pretrained(path)
    return path


@torch.no_grad()
def plant(
    model: PreTrainedModel,
    *,
    bos: int,
    layer: int = 2,
    mark: int = 5,
    outlier: int = 7,
    same: int = 9,
) -> None:
    """Write a sink into random weights: BOS -> a neuron of a layer -> a large dimension -> every later key.

    Queries read it by a dimension that is the same in every token, since a Llama has no biases.
    """
    config, layers = model.config, model.model.layers
    width = config.hidden_size // config.num_attention_heads
    slowest = width // 2 - 1  # of its rotary pairs
    table = model.model.embed_tokens.weight
    table[:, mark] = 0
    table[bos] = 0
    table[bos, mark] = 100
    table[:, same] = 30
    mlp = layers[layer].mlp
    for weight, value in ((mlp.gate_proj.weight, 3.0), (mlp.up_proj.weight, 3.0)):
        weight[0] = 0
        weight[0, mark] = value
    mlp.down_proj.weight[:, 0] = 0
    mlp.down_proj.weight[outlier, 0] = 0.2
    for one in layers[layer + 1 :]:
        one.self_attn.q_proj.weight[slowest::width] = 0
        one.self_attn.q_proj.weight[slowest::width, same] = 0.5
        one.self_attn.k_proj.weight[slowest::width] = 0
        one.self_attn.k_proj.weight[slowest::width, outlier] = 0.5


NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def write_gguf(model: PreTrainedModel, *, path: Path) -> None:
    """Write a model as a GGUF file with weights in Q8_0."""
    config = model.config
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_name(path.stem)
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10_000.0)
    words = [chr(code) if 33 <= code < 127 else chr(256 + code) for code in range(256)]
    words += ["he", "hel", "<e>", *(f"<{number}>" for number in range(259, VOCABULARY))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    kinds = [gguf.TokenType.NORMAL] * VOCABULARY
    kinds[BOS_OF_GGUF] = gguf.TokenType.CONTROL
    writer.add_token_types(kinds)
    writer.add_token_merges(["h e", "he l"])
    writer.add_add_bos_token(True)
    writer.add_bos_token_id(BOS_OF_GGUF)
    writer.add_eos_token_id(BOS_OF_GGUF)
    named = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
    }
    for name, weights in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        if (known := named.get(name)) is None:
            _, _, layer, rest = name.split(".", 3)
            part, kind = rest.rsplit(".", 1)
            known = f"blk.{layer}.{NAMES[part]}.{kind}"
        values = weights.float().numpy()
        if config.model_type == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            values = interleaved(values, width=config.hidden_size // config.num_attention_heads)
        if values.ndim > 1:
            values = gguf.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(known, values, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(known, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(weights: np.ndarray, *, width: int) -> np.ndarray:
    """Order the rows of each head as a GGUF file of a Llama has them: the two of a rotary pair side by side."""
    return (
        weights.reshape(-1, 2, width // 2, weights.shape[-1]).swapaxes(1, 2).reshape(weights.shape)
    )


if __name__ == "__main__":
    main()
