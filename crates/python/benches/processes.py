"""Data-parallel training in one process and in several, a thread each, in turns: tokens per second, and the same losses.

    python benches/processes.py --processes 2 --rounds 5 --json processes.json
    python benches/processes.py --processes 2 --rounds 1 --steps 4 --width 64 --tokens 32    # does it run, and agree

It runs `examples/data_parallel.py`, with `torchrun` where there are several processes.
"""

from __future__ import annotations

import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
from typing import Any

import common

EXAMPLE = pathlib.Path(__file__).resolve().parents[1] / "examples" / "data_parallel.py"
#: How far the losses of the first steps may be apart, of their size. Later ones are told only: Adam divides gradients by their own size,
#: so that what rounding leaves of small ones grows from step to step.
TOLERANCE = 1e-5
STEPS = 3


def trained(processes: int, options: dict[str, Any]) -> dict[str, Any]:
    """What the example tells of one run."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] if processes > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "result.json"
        arguments = [f"--{name}={value}" for name, value in {**options, "threads": 1, "json": file}.items()]
        subprocess.run([sys.executable, *launch, str(EXAMPLE), *arguments], check=True, stdout=subprocess.DEVNULL)
        result: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    if result["processes"] != processes:
        raise SystemExit(f"error: {result['processes']} processes have trained, not {processes}")
    return result


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    sizes = {"steps": 20, "batch": 16, "tokens": 128, "width": 256, "layers": 4}
    parser = common.parser_of(__doc__, processes=2, rounds=5, **sizes)
    parser.add_argument("--mechanism", default="fna", help="preset or JSON (default: fna)")
    options = parser.parse_args(arguments)
    own = {name: getattr(options, name) for name in (*sizes, "mechanism")}
    results: dict[str, Any] = {"machine": common.machine(1), "options": vars(options)}
    runs: dict[int, list[dict[str, Any]]] = {1: [], options.processes: []}
    for n in range(options.rounds):
        for processes in list(runs) if n % 2 == 0 else list(runs)[::-1]:
            runs[processes].append(trained(processes, own))
    one, several = (runs[processes][0]["losses"] for processes in runs)
    apart = [abs(a - b) / abs(a) for a, b in zip(one, several)]
    far, first = max(apart), max(apart[:STEPS])
    if not first <= TOLERANCE:
        raise SystemExit(f"error: the losses of the first {STEPS} steps are {first:.1e} of their size apart")
    speeds = {processes: [run["tokens_per_second"] for run in done] for processes, done in runs.items()}
    medians = {processes: statistics.median(all_of) for processes, all_of in speeds.items()}
    ratio = medians[options.processes] / medians[1]
    results |= {"tokens_per_second": speeds, "ratio": ratio, "losses": several, "first_losses_apart": first, "losses_apart": far}
    print(f"{medians[1]:.0f} tokens/s in one process, {medians[options.processes]:.0f} in {options.processes}")
    print(f"{ratio:.2f} times as many; the first losses are {first:.1e} of their size apart, all {far:.1e}")
    common.write(results, options.json)
    return results


if __name__ == "__main__":
    main()
