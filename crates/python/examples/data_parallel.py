"""Data-parallel training of a model of transformers with another attention, over gloo.

    torchrun --standalone --nproc-per-node 2 data_parallel.py --mechanism fna --threads 1
    python data_parallel.py --mechanism fna --threads 1          # the same in one process: the same losses, to rounding

The model is a small GPT-2 with random weights, the text is generated; both stand for yours. Nothing of the conversion needs to know of
the processes: what a mechanism learns are parameters of the model, which `DistributedDataParallel` averages like the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel

import resolvent

WORDS = 256


def text(batch: int, tokens: int, seed: int) -> Tensor:
    """Sequences in which each word follows from the one before it, but for every eighth, ``[batch, tokens]``."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, WORDS, (batch,), generator=generator)]
    for _ in range(tokens - 1):
        drawn = torch.randint(0, WORDS, (batch,), generator=generator)
        surprising = torch.rand(batch, generator=generator) < 0.125
        rows.append(torch.where(surprising, drawn, (5 * rows[-1] + 3) % WORDS))
    return torch.stack(rows, 1)


def model_of(mechanism: str, width: int, layers: int, tokens: int) -> nn.Module:
    """A GPT-2 whose attention is the mechanism, the same in every process."""
    torch.manual_seed(0)
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=max(width // 32, 1), vocab_size=WORDS, n_positions=tokens, bos_token_id=None, eos_token_id=None
    )
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    model: nn.Module = GPT2LMHeadModel(config)
    resolvent.convert(model, mechanism)
    return model.train()


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Trains on this process's part of every batch; the losses are those of whole batches."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    if arguments.batch % size:
        raise SystemExit(f"--batch {arguments.batch} is not a multiple of {size} processes")
    model = model_of(arguments.mechanism, arguments.width, arguments.layers, arguments.tokens)
    parallel = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    optimizer = torch.optim.AdamW(parallel.parameters(), lr=arguments.lr)
    losses, seconds = [], []
    for step in range(arguments.steps):
        words = text(arguments.batch, arguments.tokens, seed=step).chunk(size)[rank]
        begin = time.perf_counter()
        loss = parallel(input_ids=words, labels=words, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if size > 1:
            # As many tokens in every process: the mean of the means is the mean.
            dist.all_reduce(mean)
        seconds.append(time.perf_counter() - begin)
        losses.append(mean.item() / size)
    speed = arguments.batch * arguments.tokens / statistics.median(seconds)
    return {"processes": size, "threads": torch.get_num_threads(), "losses": losses, "tokens_per_second": speed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mechanism", default="fna", help="preset or JSON (default: fna)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8, help="sequences of all processes together")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=1, help="of every process")
    parser.add_argument("--json", metavar="FILE", help="where to write losses and tokens per second")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    try:
        result = train(arguments)
        first = not dist.is_initialized() or dist.get_rank() == 0
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    if first:
        print(f"loss {result['losses'][0]:.4f} -> {result['losses'][-1]:.4f}, {result['tokens_per_second']:.0f} tokens/s")
        if arguments.json:
            with open(arguments.json, "w", encoding="utf-8") as file:
                json.dump(result, file)


if __name__ == "__main__":
    main()
