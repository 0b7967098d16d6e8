"""Watch sinks and outliers in your own training with transformers.Trainer: two lines, marked below.

A tiny Llama reads the bundled prose byte by byte; ``--model`` goes on with a model of yours, ``--text`` reads another
file. The readings are in the Trainer's own log, in ``monitor.parquet`` under ``--out``, and in TensorBoard with
``--report-to tensorboard`` (then ``tensorboard --logdir runs/watched``).

Prints on the default model, which is a new one (the Trainer's own lines left out):

    step 0: mass_first 0.059, rate_first 0.000, max_activation 0.126, max_logit 0.136
    step 50: mass_first 0.051, rate_first 0.000, max_activation 1.272, max_logit 6.395
    step 100: mass_first 0.048, rate_first 0.000, max_activation 1.922, max_logit 9.250
    step 150: mass_first 0.044, rate_first 0.000, max_activation 1.813, max_logit 14.586
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainingArguments,
)

from sink_lens.data.corpora import bundled_text
from sink_lens.training import SinkMonitorCallback  # the first line

LENGTH = 64


def main(arguments: Sequence[str] | None = None) -> None:
    """Train and print the readings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model", help="folder or name of a model to go on with, with its tokenizer"
    )
    parser.add_argument("--text", type=Path, help="a text file; the bundled prose if not given")
    parser.add_argument("--out", default="runs/watched")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--report-to", default="none", help="tensorboard or wandb, where it is installed"
    )
    asked = parser.parse_args(arguments)

    text = asked.text.read_text(encoding="utf-8") if asked.text else bundled_text()
    torch.manual_seed(0)
    if asked.model:
        model = AutoModelForCausalLM.from_pretrained(asked.model)
        ids = AutoTokenizer.from_pretrained(asked.model)(text)["input_ids"]
    else:
        sizes: Any = {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        model, ids = LlamaForCausalLM(LlamaConfig(vocab_size=256, **sizes)), list(text.encode())
    tokens = torch.tensor(ids[: 8 * LENGTH * asked.steps])
    rows: Any = [
        {"input_ids": row, "labels": row}
        for row in tokens[: len(tokens) // LENGTH * LENGTH].view(-1, LENGTH)
    ]
    every = max(1, asked.steps // 4)
    args = TrainingArguments(
        output_dir=asked.out,
        max_steps=asked.steps,
        learning_rate=3e-3,
        logging_steps=every,
        report_to=asked.report_to,
        use_cpu=True,
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=args, train_dataset=rows)
    folder = Path(asked.out) / "monitor"
    trainer.add_callback(
        SinkMonitorCallback(every=every, trainer=trainer, folder=folder)
    )  # the second line
    trainer.train()
    for entry in trainer.state.log_history:
        if "sinks/mass_first" in entry:
            names = ("mass_first", "rate_first", "max_activation", "max_logit")
            print(
                f"step {entry['sinks/step']:.0f}: "
                + ", ".join(f"{name} {entry[f'sinks/{name}']:.3f}" for name in names)
            )


if __name__ == "__main__":
    main()
