"""What processes that share a sequence send each other, by mechanism: counted, and where Linux counts them, on the wire.

    python benches/shards.py --processes 4 --tokens 4096 --json shards.json

All processes are on this machine and talk over its loopback device, whose bytes, of all processes and with the headers of TCP, are
those of `wire`; other programs' are among them (`unshare -rn sh -c 'ip link set lo up; python ...'` has none).
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import sys
import tempfile
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from resolvent import Mechanism, MechanismLike
from resolvent.torch.distributed import attend, exchange_of, traffic

POOLED = {"kind": "pool", "count": 49}
MECHANISMS: dict[str, MechanismLike] = {
    "uniform": "uniform",
    "linear-infsa": "linear-infsa",
    "linear": "linear",
    "linear, causal": "linear",
    "performer": "performer",
    "soft-pp, 49 landmarks": Mechanism.soft_pp(landmarks=POOLED),
    "laplacian, 49 landmarks": Mechanism.laplacian(landmarks=POOLED, inverse="cholesky"),
    "nystromformer, 64 landmarks": "nystromformer",
    "local, a window of 256": "local",
    "infsa": "infsa",
    "softmax": "softmax",
    "softmax, causal": "softmax",
    "fna": "fna",
    "relu": "relu",
    "ssa": "ssa",
}


def on_the_wire() -> int | None:
    """Bytes that the loopback device has carried, where the system tells."""
    try:
        text = pathlib.Path("/proc/net/dev").read_text(encoding="ascii")
    except OSError:
        return None
    return next((int(line.split()[1]) for line in text.splitlines() if line.strip().startswith("lo:")), None)


def run(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=options.processes)
    shape = (options.batch, options.heads, options.tokens // options.processes, options.channels)
    rows = []
    for name, mechanism in MECHANISMS.items():
        found, causal = Mechanism.of(mechanism), "causal" in name
        q, k, v = (torch.randn(shape, requires_grad=True) for _ in range(3))
        row: dict[str, Any] = {"mechanism": name, "exchange": exchange_of(found, causal)}
        dist.barrier()
        for kind in ("forward", "backward"):
            before = on_the_wire()
            dist.barrier()
            with traffic() as sent:
                if kind == "forward":
                    out = attend(q, None if found.tied else k, v, found, causal=causal, lengths=[shape[2]] * options.processes)
                else:
                    out.sum().backward()  # type: ignore[no-untyped-call]
            dist.barrier()
            after = on_the_wire()
            most = torch.tensor([sent.bytes, sent.messages])
            total = most.clone()
            dist.all_reduce(most, dist.ReduceOp.MAX)
            dist.all_reduce(total)
            row[kind] = {"most_of_a_process": int(most[0]), "rounds": int(most[1]), "all": int(total[0])}
            row[kind]["wire"] = None if before is None or after is None else after - before
            dist.barrier()
        rows.append(row)
    if rank == 0:
        pathlib.Path(folder, "rows.json").write_text(json.dumps(rows), encoding="utf-8")
    dist.destroy_process_group()


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    options = common.parser_of(__doc__, processes=2, batch=1, heads=8, tokens=4096, channels=64).parse_args(arguments)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (options, folder), nprocs=options.processes)  # type: ignore[attr-defined,no-untyped-call]
        rows: list[dict[str, Any]] = json.loads(pathlib.Path(folder, "rows.json").read_text(encoding="utf-8"))
    for row in rows:
        parts = [f"{kind} {row[kind]['most_of_a_process']:,} ({row[kind]['rounds']} rounds)" for kind in ("forward", "backward")]
        wire = "" if row["forward"]["wire"] is None else f"; all {row['forward']['all']:,}, on the wire {row['forward']['wire']:,}"
        print(f"{row['mechanism']} [{row['exchange']}]: {', '.join(parts)}{wire}")
    common.write(rows, options.json)
    return rows


if __name__ == "__main__":
    main()
