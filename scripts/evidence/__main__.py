"""`scripts/evidence.sh`: measures the rows of the page of evidence and writes its tables."""

import argparse
import sys
import tempfile
from pathlib import Path

import page
from rows import ROOT, Row, load
from run import Runner, build

QUICK = 2.0  # minutes of one seed
FAILURES = (OSError, RuntimeError, LookupError, StopIteration, ValueError)  # of a row; others go on


def main() -> int:
    asked = arguments()
    rows = load()
    if asked.list:
        return listed(rows)
    if asked.repeat:
        return repeated(chosen(rows, asked), asked)
    if not (asked.check or asked.render) and not measured(chosen(rows, asked), asked):
        return 1
    before = page.PAGE.read_text(encoding="utf-8")
    after = page.rendered(before, rows)
    if asked.check and before != after:
        print(f"{page.PAGE} is not what docs/evidence/ gives: `scripts/evidence.sh --render` writes it", file=sys.stderr)
        return 1
    if before != after:
        page.PAGE.write_text(after, encoding="utf-8")
    return 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/evidence.sh", description="Measures the rows of docs/evidence.md and writes its tables.")
    parser.add_argument("row", nargs="*", help="rows to measure, by their ids [default: all]")
    parser.add_argument("--list", action="store_true", help="say what there is, how many seeds were run, and what the rest takes")
    parser.add_argument("--check", action="store_true", help="fail where the page is not what the results give")
    parser.add_argument("--render", action="store_true", help="write the page from the results, run nothing")
    parser.add_argument("--repeat", action="store_true", help="run the first seed of every row with results anew, and say how far it is from what is kept")
    parser.add_argument("--quick", action="store_true", help=f"only rows of at most {QUICK:.0f} minutes a seed")
    parser.add_argument("--threads", type=int, help="threads of the program [default: one per core]")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "evidence", help="folder of runs, which are continued [default: runs/evidence]")
    parser.add_argument("--programs", type=Path, help="folder with `resolvent` and `examples/` [default: built from these sources]")
    parser.add_argument("--commit", help="the commit that --programs was built from [default: the checkout's]")
    return parser.parse_args()


def chosen(rows: list[Row], asked: argparse.Namespace) -> list[Row]:
    unknown = set(asked.row) - {row.id for row in rows}
    if unknown:
        raise SystemExit(f"no row is called {', '.join(sorted(unknown))}: --list names them")
    rows = [row for row in rows if row.id in asked.row or not asked.row]
    return [row for row in rows if row.minutes <= QUICK or not asked.quick]


def measured(rows: list[Row], asked: argparse.Namespace) -> bool:
    """Runs the seeds that have no result yet; whether none failed."""
    left = [(row, seed) for row in rows for seed in row.seeds if not row.recorded(seed)]
    if not left:
        return True
    runner = runner_of(rows, asked, asked.work)
    failed = 0
    for row, seed in left:
        try:
            print(f"{row.id}, seed {seed}: {runner.measure(row, seed).relative_to(ROOT)}", flush=True)
        except FAILURES as error:
            failed += 1
            print(f"{row.id}, seed {seed}: {error!r}", file=sys.stderr, flush=True)
    return not failed


def runner_of(rows: list[Row], asked: argparse.Namespace, work: Path) -> Runner:
    return Runner((asked.programs or build(rows)).resolve(), work.resolve(), asked.threads, asked.commit)


def repeated(rows: list[Row], asked: argparse.Namespace) -> int:
    """Says of every row how many figures of its first seed come out again, and how far off the farthest is."""
    kept = [(row, seed, result["figures"]) for row in rows for seed, result in list(row.results().items())[:1]]
    every, failed = {row.id: row for row in load()}, 0
    with tempfile.TemporaryDirectory() as work:
        runner = runner_of(list(every.values()), asked, Path(work))
        for row, seed, before in kept:
            try:
                for earlier in row.after:
                    runner.run(every[earlier], seed)
                after = runner.run(row, seed)
            except FAILURES as error:
                failed += 1
                print(f"{row.id}, seed {seed}: {error!r}", file=sys.stderr, flush=True)
                continue
            pairs = [(arm, name, old, after.get(arm, {}).get(name, float("nan"))) for arm, of in before.items() for name, old in of.items() if old is not None]
            same = sum(old == new for _, _, old, new in pairs)
            off = [(abs(new - old) / max(abs(old), 1e-300), arm, name, old, new) for arm, name, old, new in pairs if new != old]
            worst = "" if not off else "; farthest: {1}, {2}: {3:g}, now {4:g}".format(*max(off))
            print(f"{row.id}, seed {seed}: {same} of {len(pairs)} figures are the same{worst}", flush=True)
    return int(failed > 0)


def listed(rows: list[Row]) -> int:
    for row in rows:
        done = len(row.results())
        left = row.minutes * (len(row.seeds) - done)
        state = f"{done} of {len(row.seeds)}" + (f", {left:.0f} min left" if left else "")
        earlier = f" (the page: {row.earlier})" if row.earlier and not done else ""
        print(f"{row.id:24} {state:22} {row.claim}{earlier}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
