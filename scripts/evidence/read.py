"""Figures out of what the commands of a row have written: `{arm: {figure: number}}`."""

import json
from pathlib import Path
from statistics import fmean
from string import Template

from rows import Column, Row

BETWEEN = " | "  # the parts of an arm's name
WITHIN = " ±"  # behind a figure's name: its deviation over the draws of one command


def figures(row: Row, seed: int, work: Path, printed: str) -> dict[str, dict[str, float]]:
    """What one seed of `row` gave in the folder `work`; `printed` is what it wrote to standard output."""
    readers = {"comparison": comparison, "files": files, "table": table}
    return readers[row.read["kind"]](row, seed, work, printed)


def comparison(row: Row, seed: int, work: Path, _: str) -> dict:
    """Of `resolvent compare`: every mechanism is an arm, a column's path leads through its run."""
    found = document(work / row.read["folder"].replace("$seed", str(seed)) / "results.json")
    return {entry["name"]: values(row.columns, entry["runs"][0]) for entry in found["entries"]}


def files(row: Row, seed: int, work: Path, _: str) -> dict:
    """Of several commands: a row's `arms`, whose parts are `$KEY` in the path `file`, or a column's own, and in a column's path."""

    def value(column: Column, arm: str) -> float:
        names = {"seed": str(seed), **dict(zip(row.keys, arm.split(BETWEEN)))}
        file, path = (Template(text).substitute(names) for text in (column.file or row.read["file"], column.path))
        return at(document(work / file), path)

    return {arm: {column.name: value(column, arm) for column in row.columns} for arm in row.read["arms"]}


def table(row: Row, _: int, __: Path, printed: str) -> dict:
    """Of a printed Markdown table, the one whose head has all keys and columns."""
    wanted = [*row.keys, *(column.name for column in row.columns)]
    for head, lines in tables(printed):
        if all(name in head for name in wanted):
            cells = [dict(zip(head, line)) for line in lines]
            return {
                BETWEEN.join(line[key] for key in row.keys): dict(
                    pair for column in row.columns for pair in numbers(column.name, line[column.name])
                )
                for line in cells
            }
    raise ValueError(f"no table has the columns {', '.join(wanted)}")


def tables(text: str) -> list[tuple[list[str], list[list[str]]]]:
    """The Markdown tables of a text: heads and lines."""
    found, block = [], []
    for line in [*text.splitlines(), ""]:
        if line.startswith("|"):
            line = line.strip().strip("|").replace("\\|", "\0")
            block.append([cell.strip().replace("\0", "|") for cell in line.split("|")])
        elif block:
            found.append((block[0], block[2:]))
            block = []
    return found


def numbers(name: str, cell: str) -> list[tuple[str, float | None]]:
    """A cell's number, and the deviation behind it where a command means over draws of its own; `0.9 (0.8)` is 0.9."""
    value, _, deviation = cell.partition(" (")[0].partition(" ± ")
    return [(name, number(value))] + ([(name + WITHIN, number(deviation))] if deviation else [])


def number(cell: str) -> float | None:
    """A cell's number, a share, or how many times; none where it has words."""
    try:
        return float(cell.removesuffix(" %").removesuffix("x"))
    except ValueError:
        return None


def document(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def values(columns: tuple[Column, ...], of: dict) -> dict:
    return {column.name: at(of, column.path) for column in columns}


def at(value, path: str):
    """What a dotted path leads to: names of fields, places in lists, `name=value` for the first element of a list that has it, and
    `*name=value` for the mean over all that have it and a number behind it."""
    if not path:
        return value
    step, _, rest = path.partition(".")
    if "=" in step:
        name, _, wanted = step.lstrip("*").partition("=")
        having = [element for element in value if str(element[name]) == wanted]
        if not step.startswith("*"):
            return at(having[0], rest)
        found = [at(element, rest) for element in having]
        numbers = [number for number in found if number is not None]
        return fmean(numbers) if numbers else None
    if value is None:
        return None
    return at(value[int(step)] if isinstance(value, list) else value[step], rest)
