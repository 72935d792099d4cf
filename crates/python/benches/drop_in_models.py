"""Two small transformers with softmax, trained from scratch, for `drop_in.py`: reviews read as bytes, and pictures read in small patches.

Both are first trained on fewer tokens, which costs less, then on as many as they are measured with.
"""

from __future__ import annotations

import gzip
import importlib
import io
import json
import math
import pathlib
import time
from typing import Any, Callable, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification, ViTConfig, ViTForImageClassification

import resolvent.torch

#: Rows of the table of n-grams, and the longest of these.
BUCKETS, LONGEST = 1 << 16, 6
#: The token that stands before a text.
FIRST = 256
#: Share of the time that training spends on a quarter of the tokens.
SHORT = 0.6
#: Tokens of a batch in training.
BATCH = 8192


class Classifier(nn.Module):
    """A model of transformers: its last hidden states of given inputs, and its classes by these."""

    def classes(self, states: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def pooled(states: Tensor) -> Tensor:
        """What the model classifies by: the first token."""
        return states[:, 0]


def _sizes(width: int, layers: int) -> dict[str, Any]:
    """Heads of 32 channels. Weights begin wide enough for attention to tell tokens apart: at 0.02, the default of large models, it stays
    uniform in short training."""
    heads = {"num_hidden_layers": layers, "num_attention_heads": width // 32}
    return {"hidden_size": width, "intermediate_size": 4 * width, **heads, "initializer_range": width**-0.5}


class Reader(Classifier):
    """BERT on bytes, each shown with the n-grams that end at it."""

    def __init__(self, width: int, layers: int, tokens: int) -> None:
        super().__init__()
        self.grams = nn.Embedding(BUCKETS, width)
        nn.init.normal_(self.grams.weight, std=0.1)
        dropout: dict[str, Any] = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.1}
        config = BertConfig(**_sizes(width, layers), **dropout, vocab_size=1, max_position_embeddings=tokens)
        config._attn_implementation = "sdpa"
        self.body: Any = BertForSequenceClassification(config)

    def forward(self, ids: Tensor) -> Tensor:
        """States of ``[texts, tokens]``, of which training gives fewer, from a place drawn at random."""
        fewer = self.body.config.max_position_embeddings - ids.shape[1]
        begin = int(torch.randint(0, fewer + 1, ())) if self.training else 0
        places = torch.cat([torch.zeros(1, dtype=torch.long), torch.arange(1, ids.shape[1]) + begin])
        hashes, shifted, rows = ids, ids, [ids]
        for _ in range(LONGEST - 1):
            shifted = nn.functional.pad(shifted, (1, 0))[:, :-1]
            hashes = (hashes * 1_000_003 + shifted + 1) % ((1 << 31) - 1)
            rows.append(257 + hashes % (BUCKETS - 257))
        bags = torch.stack(rows, -1).reshape(-1, LONGEST)
        shown = nn.functional.embedding_bag(bags, self.grams.weight, mode="sum").reshape(*ids.shape, -1)
        states: Tensor = self.body.bert(inputs_embeds=shown, position_ids=places[None]).last_hidden_state
        return states

    def classes(self, states: Tensor) -> Tensor:
        found: Tensor = self.body.classifier(self.body.bert.pooler(states))
        return found


class Viewer(Classifier):
    """A vision transformer on patches of two by two."""

    def __init__(self, width: int, layers: int, side: int) -> None:
        super().__init__()
        sizes = {**_sizes(width, layers), "num_labels": 10}
        config = ViTConfig(**sizes, image_size=side, patch_size=2, num_channels=1)
        config._attn_implementation = "sdpa"
        self.body: Any = ViTForImageClassification(config)

    def forward(self, pictures: Tensor) -> Tensor:
        states: Tensor = self.body.vit(pixel_values=pictures, interpolate_pos_encoding=True).last_hidden_state
        return states

    def classes(self, states: Tensor) -> Tensor:
        found: Tensor = self.body.classifier(states[:, 0])
        return found


class Data(Protocol):
    """Examples to train and to measure with."""

    def draw(self, count: int, short: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Inputs and labels from the part for training, at a quarter of the tokens or at all."""

    def held(self, count: int) -> tuple[Tensor, Tensor]:
        """Inputs and labels of the part for testing, the same ones in every run."""


class Reviews:
    """IMDb: reviews of at least as many bytes as are read, in training any piece of them, in testing their end."""

    def __init__(self, folder: pathlib.Path, tokens: int) -> None:
        self.bytes = tokens - 1
        self.parts = {part: self._read(folder / f"{part}.jsonl.zst") for part in ("train", "test")}

    def _read(self, file: pathlib.Path) -> list[tuple[NDArray[np.uint8], int]]:
        zstandard: Any = importlib.import_module("zstandard")
        with open(file, "rb") as packed:
            lines = io.TextIOWrapper(zstandard.ZstdDecompressor(max_window_size=2**31).stream_reader(packed), "utf-8", newline="\n")
            found = [json.loads(line) for line in lines]
        texts = [(np.frombuffer(one["text"].replace("<br />", "\n").encode(), np.uint8), int(one["label"])) for one in found]
        return [(text, label) for text, label in texts if len(text) > self.bytes + 1]

    @staticmethod
    def _inputs(pieces: list[NDArray[np.uint8]], labels: list[int]) -> tuple[Tensor, Tensor]:
        ids = torch.from_numpy(np.stack(pieces).astype(np.int64))
        return nn.functional.pad(ids, (1, 0), value=FIRST), torch.tensor(labels)

    def draw(self, count: int, short: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        length = self.bytes // 4 if short else self.bytes
        chosen = [self.parts["train"][n] for n in torch.randint(0, len(self.parts["train"]), (count,), generator=generator).tolist()]
        begins = [int(torch.randint(0, len(text) - length + 1, (), generator=generator)) for text, _ in chosen]
        return self._inputs([text[n : n + length] for (text, _), n in zip(chosen, begins)], [label for _, label in chosen])

    def held(self, count: int) -> tuple[Tensor, Tensor]:
        # The file has good and bad reviews in turns, by the number that the film has.
        order = np.random.default_rng(0).permutation(len(self.parts["test"]))[:count]
        chosen = [self.parts["test"][n] for n in order]
        return self._inputs([text[-self.bytes :] for text, _ in chosen], [label for _, label in chosen])


class Pictures:
    """Fashion-MNIST, enlarged to twice as many pixels a side as there are patches."""

    def __init__(self, folder: pathlib.Path, side: int) -> None:
        self.side = side
        names = {"train": "train", "test": "t10k"}
        self.pictures = {part: self._read(folder / f"{name}-images-idx3-ubyte.gz", 16).reshape(-1, 1, 28, 28) for part, name in names.items()}
        self.labels = {part: self._read(folder / f"{name}-labels-idx1-ubyte.gz", 8).long() for part, name in names.items()}

    @staticmethod
    def _read(file: pathlib.Path, header: int) -> Tensor:
        with gzip.open(file) as packed:
            return torch.from_numpy(np.frombuffer(packed.read(), np.uint8, offset=header).copy())

    def _inputs(self, part: str, rows: Tensor, side: int) -> tuple[Tensor, Tensor]:
        pictures = self.pictures[part][rows].float() / 127.5 - 1
        return nn.functional.interpolate(pictures, size=(side, side), mode="bilinear"), self.labels[part][rows]

    def draw(self, count: int, short: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        rows = torch.randint(0, len(self.labels["train"]), (count,), generator=generator)
        pictures, labels = self._inputs("train", rows, self.side // 2 if short else self.side)
        mirrored = torch.rand(count, 1, 1, 1, generator=generator) < 0.5
        return torch.where(mirrored, pictures.flip(-1), pictures), labels

    def held(self, count: int) -> tuple[Tensor, Tensor]:
        return self._inputs("test", torch.randperm(len(self.labels["test"]), generator=torch.Generator().manual_seed(0))[:count], self.side)


class Noise:
    """Inputs and labels that mean nothing, to see whether all runs."""

    def __init__(self, kind: str, tokens: int) -> None:
        self.kind, self.tokens = kind, tokens

    def draw(self, count: int, short: bool, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        labels = torch.randint(0, 2, (count,), generator=generator)
        if self.kind == "text":
            return torch.randint(0, 256, (count, self.tokens // 4 if short else self.tokens), generator=generator), labels
        side = 2 * math.isqrt(self.tokens) // (2 if short else 1)
        return torch.rand(count, 1, side, side, generator=generator), labels

    def held(self, count: int) -> tuple[Tensor, Tensor]:
        return self.draw(count, False, torch.Generator().manual_seed(0))


def model_of(kind: str, width: int, layers: int, tokens: int, seed: int = 0) -> Classifier:
    """Untrained; of pictures `tokens` patches, beside which is the first token."""
    torch.manual_seed(seed)
    return Reader(width, layers, tokens) if kind == "text" else Viewer(width, layers, 2 * math.isqrt(tokens))


def data_of(kind: str, folder: str | None, tokens: int) -> Data:
    if folder is None:
        return Noise(kind, tokens)
    where = pathlib.Path(folder)
    return Reviews(where, tokens) if kind == "text" else Pictures(where, 2 * math.isqrt(tokens))


def train(model: Classifier, data: Data, tokens: int, minutes: float, rate: float = 1e-3) -> dict[str, Any]:
    """Trains for so many minutes of the processor, at a rate that rises and falls with them; tells what it took."""
    begin = time.process_time()
    return {"minutes": minutes, **descend(model, data, tokens, lambda step: (time.process_time() - begin) / (60 * minutes), rate)}


def train_steps(model: Classifier, data: Data, tokens: int, short: int, whole: int, rate: float = 1e-3, seed: int = 0) -> dict[str, Any]:
    """Trains for so many steps on a quarter of the tokens, then for so many on all."""

    def gone(step: int) -> float:
        if step >= short + whole:
            return 1.0
        return SHORT * step / short if step < short else SHORT + (1 - SHORT) * (step - short) / whole

    return descend(model, data, tokens, gone, rate, seed)


def descend(
    model: Classifier, data: Data, tokens: int, progress: Callable[[int], float], rate: float = 1e-3, seed: int = 0
) -> dict[str, Any]:
    """Trains until the progress, of which the number of steps is told, is 1; the rate rises and falls with it."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.01)
    told, step, examples, losses = 0.0, 0, {"short": 0, "whole": 0}, [0.0]
    model.train()
    with resolvent.torch.accelerate():
        while (gone := progress(step)) < 1:
            short = gone < SHORT
            # The rate rises anew where texts become longer.
            part = gone / SHORT if short else (gone - SHORT) / (1 - SHORT)
            for group in optimizer.param_groups:
                group["lr"] = rate * min(part / 0.05, 1.0) * (0.5 + 0.5 * math.cos(math.pi * gone))
            inputs, labels = data.draw(max(BATCH // (tokens // 4 if short else tokens), 1), short, generator)
            loss = nn.functional.cross_entropy(model.classes(model(inputs)), labels)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(float(loss.detach()))
            examples["short" if short else "whole"] += len(labels)
            step += 1
            if gone - told > 0.1:
                told = gone
                print(f"{gone:.2f} of the training: {examples}, loss {np.mean(losses[-50:]):.3f}", flush=True)
    model.eval()
    return {"examples": examples, "loss": float(np.mean(losses[-50:]))}
