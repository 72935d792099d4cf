"""A vision transformer trained through other attention than softmax: from the start, and on from a model that softmax has trained.

    python benches/training.py --data fashion-mnist --json training.json
    python benches/training.py --tokens 64 --width 32 --layers 1 --short 2 --whole 2 --further 1 --measured 6 --seeds 2   # does it run, on noise

The model and the data are those of `drop_in.py --model vision`: 1,024 patches of Fashion-MNIST. A seed is that of the weights, of the pictures
that are drawn for training and of their order, and of the plans; every way of attending begins with the same weights and sees the same
pictures. What goes on from softmax is measured before (`in place`) and after as many further steps as softmax itself goes on with. Seconds of the
processor are of training and of the tests beside it.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import common
import drop_in_models as models
import numpy as np
import torch
from drop_in import Way, paired, preset, states_of
from torch import Tensor

#: What is measured of a way, and how the table calls it.
MEASURED = {"start": "trained from the start", "in place": "in place of softmax, untrained", "continued": "and trained on"}


def ways_of() -> dict[str, Way]:
    """Softmax, `routed` with and without means, and controls: the mean of all values, and a window of as many pairs at 1,025 tokens."""
    return {
        "softmax": Way(),
        "uniform": preset("uniform"),
        "routed": preset("routed"),
        "routed, without means": preset("routed", estimator="importance", samples=0),
        "local, a window of 41": preset("local", window=41),
    }


def accuracy(model: models.Classifier, held: tuple[Tensor, Tensor]) -> float:
    """The share of inputs that get their label."""
    _, classes = states_of(model, held[0])
    return float((classes == held[1]).double().mean())


def one_seed(options: argparse.Namespace, data: models.Data, seed: int) -> dict[str, dict[str, float]]:
    """Accuracies of every way, and seconds."""
    held = data.held(options.measured)
    found: dict[str, dict[str, float]] = {}
    trained: dict[str, Tensor] = {}
    for begin in ("start", "continued"):
        for name, way in ways_of().items():
            model = models.model_of("vision", options.width, options.layers, options.tokens, seed)
            if begin == "continued":
                model.load_state_dict(trained)
            way.place(model, seed)
            row, clock = found.setdefault(name, {}), time.process_time()
            if begin == "start":
                models.train_steps(model, data, options.tokens, options.short, options.whole, seed=seed)
            else:
                row["in place"] = accuracy(model.eval(), held)
                models.train_steps(model, data, options.tokens, 0, options.further, seed=1000 + seed)
            row[begin] = accuracy(model, held)
            row[f"{begin}, seconds"] = time.process_time() - clock
            if begin == "start" and name == "softmax":
                trained = {key: x.clone() for key, x in model.state_dict().items()}
            print(f"seed {seed}: {name}: " + ", ".join(f"{key} {x:.3f}" for key, x in row.items()), flush=True)
    return found


def table(rows: list[dict[str, dict[str, float]]]) -> str:
    """Means and deviations over the seeds, and p of a paired test against softmax, as a table in Markdown."""
    lines = ["| attention | " + " | ".join(MEASURED.values()) + " |", "|" + "---|" * (1 + len(MEASURED))]
    for name in rows[0]:
        cells = [name]
        for key in MEASURED:
            own, control = ([row[of][key] for row in rows] for of in (name, "softmax"))
            cell = f"{np.mean(own):.3f}" + (f" ± {np.std(own, ddof=1):.3f}" if len(own) > 1 else "")
            p = paired(own, control)["p"]
            cells.append(cell + ("" if math.isnan(p) else f" (p {p:.2f})"))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    numbers = {"tokens": 1024, "width": 64, "layers": 3, "short": 600, "whole": 240, "further": 60, "measured": 1000, "seeds": 3, "threads": 1}
    parser = common.parser_of(__doc__, **numbers)
    parser.add_argument("--data", metavar="FOLDER", help="of Fashion-MNIST's four files; noise where it is not given")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    data = models.data_of("vision", options.data, options.tokens)
    results: dict[str, Any] = {"machine": common.machine(options.threads), "options": vars(options), "seeds": []}
    for seed in range(options.seeds):
        results["seeds"].append(one_seed(options, data, seed))
        common.write(results, options.json)
    print(table(results["seeds"]))
    return results


if __name__ == "__main__":
    main()
