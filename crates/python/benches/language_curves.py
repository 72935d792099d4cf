"""The curves of `language.py` as a picture: perplexity over the model's own against the pairs that are seen, and against the time of
attention, for every number of tokens.

    pip install matplotlib
    python benches/language_curves.py language.json --out curves.svg
"""

from __future__ import annotations

import argparse
import importlib
import json
import pathlib
import statistics
from typing import Any

#: Ways that lose more than this are left out: they would press the others together.
MOST = 1.5
#: The way whose time is that of the model as it is.
BASE = "softmax"


def medians(rows: list[dict[str, Any]], tokens: int) -> dict[str, dict[str, Any]]:
    """By way, of all texts: the ratios, and the medians of shares and of the processor's time over that of softmax."""
    ways: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["tokens"] == tokens:
            ways.setdefault(row["way"], []).append(row)
    if BASE not in ways:
        raise SystemExit(f"error: no results of {BASE} at {tokens} tokens, which times are given over; run language.py with it")
    base = {row["text"]: row["processor"] for row in ways[BASE]}
    result = {}
    for way, found in ways.items():
        over = [row["over"] for row in found]
        share = statistics.median(row["exact"] + row["means"] for row in found)
        time = statistics.median(row["processor"] / base[row["text"]] for row in found)
        result[way] = {"over": over, "median": statistics.median(over), "share": share, "time": time}
    return result


def draw(rows: list[dict[str, Any]], out: pathlib.Path) -> None:
    """Writes the picture: a row of panels for every number of tokens."""
    plt: Any = importlib.import_module("matplotlib.pyplot")
    plt.rcParams.update({"svg.hashsalt": "language", "svg.fonttype": "none", "font.size": 9})
    lengths = sorted({row["tokens"] for row in rows})
    figure, panels = plt.subplots(len(lengths), 2, figsize=(9, 3.2 * len(lengths)), squeeze=False, sharey="row")
    for tokens, (left, right) in zip(lengths, panels):
        ways = {way: x for way, x in medians(rows, tokens).items() if x["median"] <= MOST and way != "softmax (sdpa)"}
        for n, (way, x) in enumerate(ways.items()):
            for panel, at in ((left, x["share"]), (right, x["time"])):
                panel.plot([at, at], [min(x["over"]), max(x["over"])], color=f"C{n}", linewidth=1)
                panel.plot(at, x["median"], "o", color=f"C{n}", label=way)
        left.set(xlabel="pairs seen, of all: exactly, and means", ylabel=f"perplexity over softmax's,\n{tokens:,} tokens", xlim=(0, 1.05))
        right.set(xlabel="processor's time of attention over softmax's", xlim=(0, None))
        for panel in (left, right):
            panel.axhline(1, color="0.8", zorder=0)
            panel.grid(alpha=0.3)
    panels[0][0].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(out, metadata={"Date": None})


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", nargs="+", type=pathlib.Path, help="what language.py wrote with --json")
    parser.add_argument("--out", type=pathlib.Path, required=True, help="the picture, SVG or PNG by its name")
    options = parser.parse_args(arguments)
    draw([row for file in options.results for row in json.loads(file.read_text(encoding="utf-8"))["curves"]], options.out)


if __name__ == "__main__":
    main()
