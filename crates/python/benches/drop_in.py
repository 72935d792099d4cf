"""Transformers that were trained with softmax, with other attention in its place and nothing retrained: how near their embeddings stay to
their own, what accuracy is left, which pairs are seen, and what attention takes.

    pip install zstandard
    python benches/drop_in.py --model text --data imdb --weights reader.safetensors --json text.json          # trains where there is no such file
    python benches/drop_in.py --model vision --data fashion-mnist --weights viewer.safetensors --monarch monarch-attention
    python benches/drop_in.py --model text --tokens 64 --width 32 --layers 1 --samples 4 --measured 6 --rounds 1   # does it run, on noise

The models are of `drop_in_models.py`: BERT on 1,024 bytes of IMDb's reviews, ViT on 1,024 patches of Fashion-MNIST. `--monarch` names a
checkout of what the authors of "MonarchAttention: Zero-Shot Conversion to Fast, Hardware-Aware Structured Attention" have published, whose
licence is academic; `--fit` the cosines of fits by the program `resolvent`, which are left out where it is not found.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import itertools
import json
import math
import pathlib
import shutil
import sys
import time
from typing import Any, Callable, Union

import common
import drop_in_models as models
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

import resolvent
import resolvent.torch
from resolvent import HeadMechanisms, Mechanism

Mechanisms = Union[Mechanism, HeadMechanisms]
Triple = tuple[Tensor, Tensor, Tensor]
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]

#: Examples that go through the model at once.
BATCH = 6


@dataclasses.dataclass
class Way:
    """What stands in place of softmax: a mechanism of every layer, by its name and a seed, or a function."""

    mechanism: Callable[[str, int], Mechanisms] | None = None
    attend: Attend | None = None

    def place(self, model: models.Classifier, seed: int) -> Callable[[], None]:
        """Puts it into the model; what is returned takes it out again."""
        if self.mechanism is not None:
            of = self.mechanism
            return resolvent.convert(model, lambda name, module: of(name, seed)).undo
        if self.attend is None:
            return lambda: None
        own = self.attend

        def attend(module: torch.nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> tuple[Tensor, None]:
            assert mask is None, "no token is left out here"
            return own(q, k, v).transpose(1, 2), None

        AttentionInterface.register("drop-in", attend)
        body: Any = model.body
        body.set_attn_implementation("drop-in")
        return lambda: body.set_attn_implementation("sdpa")

    def call(self, layer: str, tensors: Triple, seed: int = 0) -> Tensor:
        """Attention alone, as the model calls it."""
        if self.mechanism is not None:
            return resolvent.torch.attend(*tensors, self.mechanism(layer, seed))
        return (self.attend or scaled_dot_product_attention)(*tensors)


def preset(mechanism: str, **fields: Any) -> Way:
    """A mechanism that draws by the seed of a sample, where it draws."""
    composed = "structure" in Mechanism(mechanism).to_dict()

    def made(layer: str, seed: int) -> Mechanism:
        known = Mechanism(mechanism).to_dict()
        drawn = {"seed": seed} if "seed" in known.get("structure", known) else {}
        own = {**fields, **drawn}
        return Mechanism.from_dict({"mechanism": mechanism, **({"structure": own} if composed else own)})

    return Way(made)


def ways_of(window: int) -> dict[str, Way]:
    """Softmax, controls, and `routed`."""
    return {
        "softmax": Way(),
        "uniform": preset("uniform"),
        "linear": preset("linear"),
        "performer": preset("performer"),
        "ssa": preset("ssa"),
        f"local, a window of {window}": preset("local", window=window),
        "routed, without means": preset("routed", estimator="importance", samples=0),
        "routed": preset("routed"),
        "routed, 64 clusters, 8 outliers": preset("routed", clusters=64, outlier_globals=8),
        "routed, 128 clusters, 8 outliers": preset("routed", clusters=128, outlier_globals=8),
        "routed, 128 clusters, 8 routes, 8 outliers": preset("routed", clusters=128, routes=8, outlier_globals=8),
    }


def monarch_of(checkout: str, kind: str, tokens: int) -> dict[str, Way]:
    """The authors' own implementation on PyTorch, with blocks of the root of the tokens and larger ones; padded as their models of each kind
    are."""
    sys.path.insert(0, checkout)
    theirs: Any = importlib.import_module("ma.monarch_attention")
    pad = theirs.PadType.post if kind == "text" else theirs.PadType.pre
    root = math.isqrt(tokens)
    settings = [(root, 1), (root, 2), (root, 3), (2 * root, 1), (4 * root, 1)]
    names = [f"MonarchAttention, blocks of {size}, {steps} step{'s' if steps > 1 else ''}" for size, steps in settings]
    return {name: Way(attend=theirs.MonarchAttention(*setting, pad, "torch")) for name, setting in zip(names, settings)}


def share(mechanism: Mechanisms | None, tensors: Triple) -> float | None:
    """Pairs that are seen exactly, of all pairs of a call; none where no pair is."""
    q, k, v = tensors
    heads, n = q.shape[1], q.shape[2]
    if mechanism is None:
        return 1.0
    if isinstance(mechanism, HeadMechanisms):
        parts = [(group.mechanism, list(group.heads)) for group in mechanism.groups]
        return sum((share(part, (q[:, of], k[:, of], v[:, of])) or 0.0) * len(of) for part, of in parts) / heads
    fields = mechanism.to_dict()
    structure = fields.get("structure", fields)
    if mechanism.id != "ssa" and structure.get("kind") == "dense":
        window = min(structure.get("window") or n, n)
        return (n * (2 * window - 1) - window * (window - 1)) / n**2
    if mechanism.id == "softmax":
        return 1.0
    if not mechanism.clustered:
        return None
    seen = 0
    for labels_q, labels, blocks, edges, _ in resolvent.clusters(q, k, v, mechanism).tensors():
        of_queries, of_keys = (np.array(x).reshape(-1, n) for x in (labels_q, labels))
        queries, keys = ([np.bincount(row[row >= 0], minlength=n) for row in x] for x in (of_queries, of_keys))
        seen += sum(int(queries[one][a] * keys[one][b]) for one, a, b in np.array(blocks).reshape(-1, 3)) + len(edges)
        # Keys of no cluster are seen by all.
        seen += n * int((of_keys < 0).sum())
    return seen / (q.shape[0] * heads * n**2)


def window_of(share: float, n: int) -> int:
    """The window that sees so many of all pairs, or the next smaller one."""
    return max(w for w in range(1, n + 1) if w == 1 or n * (2 * w - 1) - w * (w - 1) <= share * n**2)


def correlation(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Of ranks (Spearman's)."""
    return float(np.corrcoef(a.argsort().argsort(), b.argsort().argsort())[0, 1])


def paired(a: list[float], b: list[float]) -> dict[str, float]:
    """The mean difference, its deviation, and p of a paired t-test: the area of t's density beyond, with t the tangent of an angle."""
    apart = np.array(a) - np.array(b)
    mean, deviation, free = float(apart.mean()), float(apart.std(ddof=1)) if len(a) > 1 else math.nan, len(a) - 1
    if not deviation > 0:
        return {"mean": mean, "deviation": deviation, "p": math.nan}
    reached = math.atan(abs(mean) / deviation * math.sqrt(len(a) / free))
    angles = np.linspace(0, math.pi / 2, 200_001)
    density = np.cos(angles) ** (free - 1)
    return {"mean": mean, "deviation": deviation, "p": float(density[angles >= reached].sum() / density.sum())}


@torch.no_grad()
def states_of(model: models.Classifier, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Last hidden states, and the most likely classes."""
    parts = [model(some) for some in torch.split(inputs, BATCH)]
    return torch.cat(parts), torch.cat([model.classes(part).argmax(-1) for part in parts])


def nearness(states: Tensor, own: Tensor, samples: int) -> dict[str, float]:
    """How near the states of the first examples are to the model's own."""
    found: dict[str, float] = {}
    embeddings, reference = (models.Classifier.pooled(x[:samples]).double() for x in (states, own))
    cosines = torch.cosine_similarity(embeddings, reference)
    found["cosine"], found["worst"] = float(cosines.mean()), float(cosines.min())
    found["tokens"] = float(torch.cosine_similarity(states[:samples].double(), own[:samples].double(), dim=-1).mean())
    upper = np.triu_indices(samples, 1)
    pairs = [torch.nn.functional.normalize(x, dim=-1) @ torch.nn.functional.normalize(x, dim=-1).T for x in (embeddings, reference)]
    found["ranks"] = correlation(*(x.numpy()[upper] for x in pairs))
    return found


def measure(model: models.Classifier, ways: dict[str, Way], data: models.Data, options: argparse.Namespace) -> dict[str, list[dict[str, float]]]:
    """Every way on every sample: no two samples have an example in common, and each has a seed."""
    inputs, labels = data.held(options.seeds * options.measured)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    for seed, (some, right) in enumerate(zip(torch.split(inputs, options.measured), torch.split(labels, options.measured))):
        own, own_classes = states_of(model, some)
        for name, way in ways.items():
            undo = way.place(model, seed)
            states, classes = states_of(model, some)
            undo()
            row = nearness(states, own, options.samples)
            row["accuracy"], row["agreement"] = (float((classes == x).double().mean()) for x in (right, own_classes))
            rows[name].append(row)
            print(f"sample {seed}: {name}: " + ", ".join(f"{key} {x:.4f}" for key, x in row.items()), flush=True)
    return rows


@torch.no_grad()
def recorded(model: models.Classifier, inputs: Tensor) -> dict[str, Triple]:
    """Queries, keys and values of every layer."""
    found: list[Triple] = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found.append((q, k, v))
        return scaled_dot_product_attention(q, k, v)

    undo = Way(attend=attend).place(model, 0)
    model(inputs)
    undo()
    conversion = resolvent.convert(model, "softmax")
    conversion.undo()
    return {layer.name: tensors for layer, tensors in zip(conversion.layers, found)}


def attended(layers: dict[str, Triple]) -> list[float]:
    """Tokens that a row of softmax attends to, of each layer: the exponential of its entropy, mean over rows."""
    found = []
    for q, k, _ in layers.values():
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        found.append(float(torch.special.entr(weights).sum(-1).exp().mean()))
    return found


def costs(ways: dict[str, Way], layers: dict[str, Triple], rounds: int) -> dict[str, dict[str, Any]]:
    """Shares of pairs, and seconds of attention in all layers, in turns."""

    def run(way: Way) -> Callable[[], object]:
        return lambda: [way.call(layer, tensors) for layer, tensors in layers.items()]

    with torch.no_grad():
        times = common.in_turns({name: run(way) for name, way in ways.items()}, rounds)
    shares: dict[str, Any] = {}
    for name, way in ways.items():
        exact = None if way.attend is not None else [share(way.mechanism and way.mechanism(layer, 0), x) for layer, x in layers.items()]
        shares[name] = None if exact is None or None in exact else float(np.mean([x or 0.0 for x in exact]))
    return {name: {"exact": shares[name], "seconds": times[name]} for name in ways}


def fits_of(model: models.Classifier, data: models.Data, targets: list[float], samples: int) -> tuple[dict[str, Way], dict[str, Any]]:
    """A mechanism for every head, found on examples of the part for training."""
    if targets and shutil.which("resolvent") is None:
        print("left out: fits, for which the program resolvent is not found", file=sys.stderr)
        return {}, {}
    ways, told = {}, {}
    inputs, _ = data.draw(samples, False, torch.Generator().manual_seed(1))
    for target in targets:
        begin = time.perf_counter()
        conversion = resolvent.convert(model, fit=target, samples=inputs)
        conversion.undo()
        layers = {layer.name: layer.mechanism for layer in conversion.layers}
        ways[f"a fit to {target:g}"] = Way(lambda layer, seed, of=layers: of[layer])  # type: ignore[misc]
        told[f"{target:g}"] = {"seconds": time.perf_counter() - begin, "samples": samples, "conversion": str(conversion)}
        print(f"a fit to {target:g}, in {told[f'{target:g}']['seconds']:.0f} s\n{conversion}", flush=True)
    return ways, told


def trained(options: argparse.Namespace, data: models.Data) -> tuple[models.Classifier, dict[str, Any]]:
    """The model, of a file where there is one, or trained and written to it."""
    model = models.model_of(options.model, options.width, options.layers, options.tokens)
    file = pathlib.Path(options.weights) if options.weights else None
    if file is not None and file.exists():
        model.load_state_dict(load_file(file))
        with safe_open(file, "pt") as opened:
            told: dict[str, Any] = json.loads((opened.metadata() or {}).get("training", "{}"))
        return model.eval(), told
    told = models.train(model, data, options.tokens, options.minutes if options.data else 0.02)
    if file is not None:
        save_file({name: x.contiguous() for name, x in model.state_dict().items()}, file, {"training": json.dumps(told)})
    return model, told


def table(rows: dict[str, list[dict[str, float]]], cost: dict[str, dict[str, Any]], examples: int) -> str:
    """Means and deviations over the samples, as a table in Markdown."""
    lines = ["| in place of softmax | cosine | worst | all tokens | ranks | same class | accuracy | seen exactly | ms |", "|" + "---|" * 9]
    for name, samples in rows.items():
        cells = [name]
        for key in ("cosine", "worst", "tokens", "ranks", "agreement", "accuracy"):
            found = [row[key] for row in samples]
            spread = f" ± {np.std(found, ddof=1):.3f}" if len(found) > 1 else ""
            cells.append((f"{np.mean(found):.3f}" + spread).replace("0.", "."))
        exact, seconds = cost[name]["exact"], cost[name]["seconds"]["processor"]
        cells += ["-" if exact is None else f"{exact:.3f}".replace("0.", "."), f"{1e3 * seconds / examples:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    numbers = {"tokens": 1024, "width": 64, "layers": 3, "minutes": 8, "samples": 24, "measured": 100, "seeds": 3, "rounds": 5, "threads": 1}
    parser = common.parser_of(__doc__, **numbers)
    parser.add_argument("--model", choices=["text", "vision"], required=True)
    parser.add_argument("--data", metavar="FOLDER", help="of IMDb's two files of lines, or of Fashion-MNIST's four; noise where it is not given")
    parser.add_argument("--weights", metavar="FILE", help="read where it is there, else written")
    parser.add_argument("--monarch", metavar="FOLDER", help="a checkout of MonarchAttention")
    parser.add_argument("--fit", type=float, nargs="*", default=[0.99], help="targets of fits")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    data = models.data_of(options.model, options.data, options.tokens)
    model, told = trained(options, data)
    inputs, _ = data.draw(2, False, torch.Generator().manual_seed(2))
    layers = recorded(model, inputs)
    seen = [share(Mechanism("routed"), tensors) or 1.0 for tensors in layers.values()]
    n = next(iter(layers.values()))[0].shape[2]
    ways = ways_of(window_of(float(np.mean(seen)), n))
    fits, fitted = fits_of(model, data, options.fit, BATCH)
    ways |= fits
    if options.monarch:
        ways |= monarch_of(options.monarch, options.model, options.tokens)
    results: dict[str, Any] = {"machine": common.machine(options.threads), "options": vars(options), "training": told, "fits": fitted}
    results["attended"], results["n"] = attended(layers), n
    print(f"softmax attends to {', '.join(f'{x:.0f}' for x in results['attended'])} of {n} tokens, by layer", flush=True)
    results["cost"] = costs(ways, layers, options.rounds)
    results["rows"] = rows = measure(model, ways, data, options)
    pairs = itertools.combinations([name for name in rows if name != "softmax"], 2)
    cosines = {name: [row["cosine"] for row in samples] for name, samples in rows.items()}
    results["differences"] = {f"{a} - {b}": paired(cosines[a], cosines[b]) for a, b in pairs}
    print(table(rows, results["cost"], len(inputs)))
    common.write(results, options.json)
    return results


if __name__ == "__main__":
    main()
