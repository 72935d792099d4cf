"""What the benches share: their arguments, runs in turns, medians, whether the machine is at rest, and the file of results."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import sys
import time
from typing import Any, Callable, Mapping

import resolvent.torch

#: Share of the cores that may be busy with something else before timings are worth little.
BUSY = 0.25


def parser_of(description: str | None, **numbers: int) -> argparse.ArgumentParser:
    """Options of a bench: whole numbers by name with their defaults, and where the results go."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", metavar="FILE", help="where to write the results")
    return parser


def write(results: Any, file: str | None) -> None:
    """Writes results as JSON, where a file is named."""
    if file:
        pathlib.Path(file).write_text(json.dumps(results, indent=1), encoding="utf-8")


def machine(threads: int) -> dict[str, Any]:
    """Where and when this ran. Warns where other programs keep the cores busy."""
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    busy = load > BUSY * cores
    if busy:
        print(f"warning: the load is {load:.1f} on {cores} cores: timings are of a busy machine", file=sys.stderr)
    names = {"machine": platform.machine(), "python": platform.python_version(), "cores": cores, "threads": threads}
    return {**names, "load": load, "busy": busy, "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}


def in_turns(ways: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of every way, by the clock, and of all threads together (`processor`), which other programs disturb less. The ways run one
    after another in every round, so that a disturbance of the machine reaches all alike."""
    clock: dict[str, list[float]] = {name: [] for name in ways}
    processor: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
    for n in range(rounds):
        names = list(ways)
        # Each way begins a round as often as any other.
        for name in names[n % len(names) :] + names[: n % len(names)]:
            begin, used = time.perf_counter(), time.process_time()
            ways[name]()
            clock[name].append(time.perf_counter() - begin)
            processor[name].append(time.process_time() - used)
    return {
        name: {"median": statistics.median(x), "least": min(x), "most": max(x), "processor": statistics.median(processor[name]), "rounds": rounds}
        for name, x in clock.items()
    }


def ratios(times: Mapping[str, Mapping[str, float]], ours: str, of: str = "median") -> dict[str, float]:
    """How many times our time the others take."""
    return {name: x[of] / times[ours][of] for name, x in times.items() if name != ours}


def accelerated(run: Callable[[], Any], taken: list[int]) -> Callable[[], Any]:
    """The same run within `resolvent.torch.accelerate`; how many calls that has answered is added to `taken`."""

    def accelerated_run() -> Any:
        with resolvent.torch.accelerate() as takeover:
            result = run()
        taken.append(takeover.report.taken)
        return result

    return accelerated_run
