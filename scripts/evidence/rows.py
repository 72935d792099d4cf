"""The rows of the page of evidence, as docs/evidence/rows.toml lists them."""

import json
import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "evidence"


@dataclass(frozen=True)
class Column:
    """A figure of every arm, and how the page shows it."""

    name: str  # in the results
    head: str  # on the page
    path: str = ""  # in the program's JSON, dotted; in a printed table the name of the column is enough
    file: str = ""  # of an arm, where it is not the row's
    scale: float = 1.0
    digits: int = 2
    log: bool = False  # over magnitudes: geometric means, factors for deviations, logarithms in the test
    test: bool = False  # against the control
    against: str = ""  # the column of the same arm that it is tested against, in place of the control


@dataclass(frozen=True)
class Row:
    """One claim and what measures it."""

    id: str
    paper: str
    claim: str
    published: str  # the paper's figure
    commands: tuple[str, ...]  # of one seed, which is `$seed`
    minutes: float  # of one seed, on two cores
    seeds: tuple[int, ...]
    read: dict  # `kind` and its settings: read.py
    columns: tuple[Column, ...]
    keys: tuple[str, ...] = ("mechanism",)  # heads of what names an arm
    arms: dict[str, str] = field(default_factory=dict)  # labels on the page
    hidden: dict[str, list[str]] = field(default_factory=dict)  # by key, what the page leaves out
    control: str = ""  # the last key of the arm that others are tested against, within the same first keys
    also_against: dict = field(default_factory=dict)  # a second table of tests: a `control`, and the `keys` with that control's key last
    after: tuple[str, ...] = ()  # rows whose runs it reads, of the same seed
    files: dict[str, str] = field(default_factory=dict)  # written before the commands run
    drawn: str = ""  # what a command without `$seed` draws and summarises by itself
    verdict: str = ""  # whether the claim holds here, in a few words
    earlier: str = ""  # what the page's figures rest on until this row is run

    def result(self, seed: int) -> Path:
        return RESULTS / f"{self.id}-{seed}.json"

    def recorded(self, seed: int) -> dict | None:
        """What a seed gave, if these commands did."""
        path = self.result(seed)
        if not path.is_file():
            return None
        found = json.loads(path.read_text(encoding="utf-8"))
        same = found["commands"] == list(self.commands) and found["files"] == self.files
        return found if same else None

    def results(self) -> dict[int, dict]:
        found = {seed: self.recorded(seed) for seed in self.seeds}
        return {seed: result for seed, result in found.items() if result}


def load(path: Path = RESULTS / "rows.toml") -> list[Row]:
    """All rows, in the order of the page."""
    rows = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["row"]:
        columns = tuple(Column(**{"head": column["name"], **column}) for column in entry.pop("columns"))
        lists = {key: tuple(entry.pop(key)) for key in ("commands", "seeds", "keys", "after") if key in entry}
        rows.append(Row(columns=columns, **lists, **entry))
    names = [row.id for row in rows]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise SystemExit(f"{path}: {', '.join(sorted(twice))} stand there twice")
    return rows
