"""A BERT-shaped encoder with and without `resolvent.torch.accelerate`, in turns: inference and a training step of the whole model.

    python benches/encoder.py --rounds 9 --json encoder.json                                  # BERT-base, 512 tokens, batch 8
    python benches/encoder.py --width 64 --layers 2 --tokens 64 --batch 2 --rounds 1          # does it run, and agree

The weights are random. Both ways' outputs and losses are compared before anything is timed.
"""

from __future__ import annotations

from typing import Any

import common
import torch
from transformers import BertConfig, BertForMaskedLM

#: How far the two outputs may be apart, of their largest number.
TOLERANCE = 1e-4


def model_of(width: int, layers: int, tokens: int) -> torch.nn.Module:
    """An encoder of heads of 64 channels, as BERT's are."""
    torch.manual_seed(0)
    config = BertConfig(
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=max(width // 64, 1),
        intermediate_size=4 * width,
        vocab_size=1000,
        max_position_embeddings=tokens,
        attention_probs_dropout_prob=0.0,
        hidden_dropout_prob=0.0,
    )
    config._attn_implementation = "sdpa"
    model: torch.nn.Module = BertForMaskedLM(config)
    return model


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    numbers = {"width": 768, "layers": 12, "tokens": 512, "batch": 8, "rounds": 5, "threads": torch.get_num_threads()}
    options = common.parser_of(__doc__, **numbers).parse_args(arguments)
    torch.set_num_threads(options.threads)
    model = model_of(options.width, options.layers, options.tokens)
    words = torch.randint(0, 1000, (options.batch, options.tokens))
    taken: list[int] = []

    def inference() -> torch.Tensor:
        model.eval()
        with torch.no_grad():
            logits: torch.Tensor = model(input_ids=words).logits
        return logits

    def training() -> torch.Tensor:
        model.train().zero_grad()
        loss: torch.Tensor = model(input_ids=words, labels=words).loss
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    results: dict[str, Any] = {"machine": common.machine(options.threads), "model": vars(options), "results": {}}
    for name, run in (("inference", inference), ("training step", training)):
        ours = common.accelerated(run, taken)
        got, expected = ours(), run()
        error = float((got - expected).abs().max() / expected.abs().max())
        if not error <= TOLERANCE or not taken[-1]:
            raise SystemExit(f"error: {name} is off by {error:.1e}, with {taken[-1]} calls taken")
        times = common.in_turns({"accelerated": ours, "pytorch": run}, options.rounds)
        over = common.ratios(times, "accelerated")["pytorch"]
        used = common.ratios(times, "accelerated", "processor")["pytorch"]
        row = {"error": error, "taken": taken[-1], "seconds": times, "pytorch_over_accelerated": over, "processor_over_accelerated": used}
        results["results"][name] = row
        seconds = times["accelerated"]["median"]
        print(f"{name}: {seconds:.3f} s accelerated; PyTorch takes {over:.2f} times as long, {used:.2f} times the processor time")
    common.write(results, options.json)
    return results


if __name__ == "__main__":
    main()
