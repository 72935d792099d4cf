"""What the benches share: turns, medians, and whether the machine is at rest."""

from __future__ import annotations

import os
import platform
import statistics
import sys
import time
from typing import Any, Callable, Mapping

#: Share of the cores that may be busy with something else before timings are worth little.
BUSY = 0.25


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
    """Seconds of every way, one run of each after another, so that what else the machine does meets all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
    for n in range(rounds):
        names = list(ways)
        # Each way begins a round as often as any other.
        for name in names[n % len(names) :] + names[: n % len(names)]:
            begin = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: {"median": statistics.median(x), "least": min(x), "most": max(x), "rounds": rounds} for name, x in seconds.items()}


def ratios(times: Mapping[str, Mapping[str, float]], ours: str) -> dict[str, float]:
    """How many times our time the others take."""
    return {name: x["median"] / times[ours]["median"] for name, x in times.items() if name != ours}
