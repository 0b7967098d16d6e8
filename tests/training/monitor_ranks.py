"""Batches and trainings of the monitor's tests; as a script, one of two processes, which writes what it read."""

import json
import sys
from pathlib import Path

import torch
from torch.distributed import init_process_group
from torch.distributed.fsdp import FullyShardedDataParallel as Fsdp1
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer, TrainingArguments

from sink_lens.training import monitor as monitoring
from sink_lens.training.arguments import leave_process_group
from sink_lens.training.monitor import SinkMonitor
from tests.tiny_families import tiny


def batches(n=6, *, sequences=4, length=40, seed=0):
    return torch.randint(
        3, 300, (n, sequences, length), generator=torch.Generator().manual_seed(seed)
    )


def trainer(folder, *callbacks, kind=Trainer, **options):
    data = [{"input_ids": row, "labels": row} for row in batches(8).flatten(0, 1)]
    plain = {
        "output_dir": str(folder),
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "report_to": "none",
    }
    plain |= {
        "use_cpu": True,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "log_level": "error",
    }
    args = TrainingArguments(**plain | options)
    return kind(model=tiny("llama"), args=args, train_dataset=data, callbacks=list(callbacks))


def main(out, how):
    torch.set_num_threads(1)
    init_process_group("gloo")
    rank = torch.distributed.get_rank()
    Path(out).with_suffix(f".{rank}").write_text(json.dumps(readings(rank, how)))
    leave_process_group()  # after the model is gone: with torch 2.13 one run in twenty hung otherwise


def readings(rank, how):
    plain = tiny("llama").train()
    layer = type(plain.model.layers[0])
    if how in ("ddp", "broken", "alone"):
        model = DistributedDataParallel(plain)
    elif how == "fsdp2":
        for one in plain.model.layers:
            fully_shard(one)
        model = fully_shard(plain)
    else:
        model = Fsdp1(
            plain,
            auto_wrap_policy=ModuleWrapPolicy({layer}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    share = batches(1, seed=5)[0, 2 * rank : 2 * rank + 2]
    found = []
    if how == "alone" and rank == 1:
        return [_trained(model, optimizer, share) for _ in range(2)]
    with SinkMonitor(model, every=1) as monitor:
        if how == "alone":
            monitoring._PATIENCE = 3
        if how == "broken" and rank == 1:
            monitor._add_stream = None  # an error of the monitor's own, in one of the processes
        for _ in range(2):
            _trained(model, optimizer, share)
            found.append(monitor.step())
    return found


def _trained(model, optimizer, share):
    model(input_ids=share, labels=share).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main(*sys.argv[1:])
