"""The tables of docs/evidence.md, between marks."""

import math
import re
from dataclasses import replace

from paired import spread, t_test
from read import BETWEEN, WITHIN
from rows import ROOT, Column, Row

PAGE = ROOT / "docs" / "evidence.md"
NUMBERS = {1: "One", 2: "Two", 3: "Three", 4: "Four", 5: "Five"}
MARK = re.compile(r"<!-- evidence: ([\w-]+) -->\n(.*?)<!-- end -->", re.DOTALL)
SUMMARY = re.compile(r"<!-- claims -->\n(.*?)<!-- end -->", re.DOTALL)


def rendered(text: str, rows: list[Row]) -> str:
    """The page with every block as rows and results give it."""
    known = {row.id: row for row in rows}
    places = MARK.findall(text)
    named = [name for name, _ in places]
    if sorted(named) != sorted(known):
        wrong = sorted(set(named) ^ set(known)) or sorted({name for name in named if named.count(name) > 1})
        raise SystemExit(f"{PAGE}: rows without a place, or places without a row: {', '.join(wrong)}")
    text = MARK.sub(lambda found: f"<!-- evidence: {found[1]} -->\n{block(known[found[1]])}<!-- end -->", text)
    return SUMMARY.sub(lambda _: f"<!-- claims -->\n{summary_of(text, rows)}\n<!-- end -->", text)


def summary_of(text: str, rows: list[Row]) -> str:
    """A line per claim: the paper's figure, what is beside it, on how many seeds, and whether it holds."""
    lines = ["| claim | paper | its figure | control | seeds | does it hold here? |", "|---|---|---|---|---|---|"]
    for row in rows:
        done = len(row.results())
        drawn = not any("$seed" in line for line in row.commands)
        seeds = (row.drawn.rstrip(".") or "nothing is drawn") if drawn else f"{done}" if done else f"typed: {row.earlier}"
        control = row.arms.get(row.control, row.control) or "none"
        cells = [f"[{row.claim}](#{anchor(text, row)})", row.paper, row.published, control, seeds, row.verdict or "-"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def anchor(text: str, row: Row) -> str:
    """That of the heading that the row stands under."""
    headings = re.findall(r"^#+ (.+)$", text[: text.index(f"<!-- evidence: {row.id} -->")], re.MULTILINE)
    return re.sub(r"[^\w\- ]", "", (headings or [""])[-1].lower()).replace(" ", "-")


def block(row: Row) -> str:
    """Commands, and where there are results their table."""
    results = row.results()
    parts = [commands(row)]
    if results:
        parts += [about(row, list(results)), table(row, list(results.values()))]
        if row.also_against and len(results) > 1:
            parts.append(second_tests(row, list(results.values())))
    return "\n\n".join(parts) + "\n"


def second_tests(row: Row, results: list[dict]) -> str:
    """A table of differences alone, to the second control that `row.also_against` names: its keys stand in another order there."""
    keys, control = tuple(row.also_against["keys"]), row.also_against["control"]
    places = [row.keys.index(key) for key in keys]
    named = lambda arm: BETWEEN.join(arm.split(BETWEEN)[place] for place in places)
    figures = [{named(arm): found for arm, found in result["figures"].items()} for result in results]
    turned = replace(row, keys=keys, control=control)
    tested = [column for column in row.columns if column.test]
    cells = {arm: [difference(turned, column, figures, arm) for column in tested] for arm in figures[0]}
    tests = markdown([*keys, *(head(turned, column) for column in tested)], turned, {arm: line for arm, line in cells.items() if any(line)})
    return f"Against {row.arms.get(control, control)}:\n\n{tests}"


def commands(row: Row) -> str:
    """As a shell takes them, over the row's seeds."""
    lines = list(row.commands)
    if any("$seed" in line for line in lines):
        seeds = " ".join(str(seed) for seed in row.seeds)
        lines = [f"for seed in {seeds}; do", *(f"    {line}" for line in lines), "done"]
    return "\n".join(f"    {line}" for line in lines)


def about(row: Row, seeds: list[int]) -> str:
    """How many runs stand behind a table, and what its last columns are."""
    if not any("$seed" in line for line in row.commands):
        return row.drawn or "Nothing is drawn."
    missing = f" of {len(row.seeds)}" if len(seeds) < len(row.seeds) else ""
    text = f"{NUMBERS.get(len(seeds), len(seeds))}{missing} seed" + ("s" if len(row.seeds) > 1 else "")
    tested = row.control and len(seeds) > 1 and any(column.test for column in row.columns)
    return text + (f", against {row.arms.get(row.control, row.control)}." if tested else ".")


def table(row: Row, results: list[dict]) -> str:
    """A line per arm: mean and deviation of every figure, then the differences to the control."""
    figures = [result["figures"] for result in results]
    tested = [column for column in row.columns if (column.against or (column.test and row.control)) and len(figures) > 1]
    heads = [*row.keys, *(column.head for column in row.columns), *(head(row, column) for column in tested)]
    cells = {}
    for arm in figures[0]:
        if not any(part in row.hidden.get(key, []) for key, part in zip(row.keys, arm.split(BETWEEN))):
            own = [summary(column, of(figures, arm, column), of(figures, arm, column, WITHIN)) for column in row.columns]
            cells[arm] = own + [difference(row, column, figures, arm) for column in tested]
    return markdown(heads, row, cells)


def markdown(heads: list[str], row: Row, cells: dict[str, list[str]]) -> str:
    """A line per arm, its keys before its cells: the first keys where they change."""
    lines, before = [heads], []
    for arm in grouped(list(cells)):
        keys = labels(row, arm.split(BETWEEN))
        lines.append(blanked(keys, before) + cells[arm])
        before = keys
    first, *rest = ["| " + " | ".join(line) + " |" for line in lines]
    return "\n".join([first, "|" + "---|" * len(heads), *rest])


def grouped(arms: list[str]) -> list[str]:
    """Arms of the same first keys side by side, else as they came."""
    groups = list(dict.fromkeys(arm.rpartition(BETWEEN)[0] for arm in arms))
    return sorted(arms, key=lambda arm: groups.index(arm.rpartition(BETWEEN)[0]))


def labels(row: Row, keys: list[str]) -> list[str]:
    """What the page calls the parts of an arm's name."""
    return [row.arms.get(key, key).replace("|", "\\|") for key in keys]


def blanked(keys: list[str], before: list[str]) -> list[str]:
    """Without the first keys that the line before has too."""
    same = 0
    while same < len(keys) - 1 and keys[:same + 1] == before[:same + 1]:
        same += 1
    return [""] * same + keys[same:]


def of(figures: list[dict], arm: str, column: Column, what: str = "") -> list[float]:
    """A figure of every seed, as the page shows it; none where a seed has not got it."""
    found = [one.get(arm, {}).get(column.name + what) for one in figures]
    return [] if None in found else [column.scale * value for value in found]


def summary(column: Column, values: list[float], within: list[float]) -> str:
    """Mean and deviation over seeds; of a single one, the deviation over the draws of its command."""
    if not values:
        return ""
    if column.log:
        return magnitude(values)
    mean, deviation = spread(values) if len(values) > 1 or not within else (values[0], within[0])
    shown = f"{mean:.{column.digits}f}"
    return shown if deviation is None else f"{shown} ± {deviation:.{column.digits}f}"


def magnitude(values: list[float]) -> str:
    """Geometric mean, and the factor of one deviation."""
    if min(values) <= 0:
        return f"0 to {brief(max(values))}" if max(values) > 0 else "0"
    mean, deviation = spread([math.log(value) for value in values])
    factor = f"{math.exp(deviation or 0):.2f}"
    return brief(math.exp(mean)) + ("" if factor == "1.00" else f" ×/÷ {factor}")


def brief(value: float) -> str:
    """Three digits, or two and a power of ten."""
    if 1e-2 <= value < 1e4:
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    mantissa, _, power = f"{value:.1e}".partition("e")
    return f"{mantissa}e{int(power)}"


def head(row: Row, column: Column) -> str:
    """The head of the column of a figure's differences, to the control or to another figure."""
    other = next((other.head for other in row.columns if other.name == column.against), "")
    return f"{column.head}: difference{f' to {other}' if other else ''}, p"


def difference(row: Row, column: Column, figures: list[dict], arm: str) -> str:
    """Of an arm to the control of its group, or of its figure to another of its own, seed by seed."""
    control = arm if column.against else BETWEEN.join([*arm.split(BETWEEN)[:-1], row.control])
    beside = next((other for other in row.columns if other.name == column.against), column)
    own, other = of(figures, arm, column), of(figures, control, beside)
    if (arm, column) == (control, beside) or not own or not other or (column.log and min(own + other) <= 0):
        return ""
    scale = math.log if column.log else float
    differences = [scale(a) - scale(b) for a, b in zip(own, other)]
    mean, p = spread(differences)[0], t_test(differences)
    shown = f"×{brief(math.exp(mean))}" if column.log else f"{mean:+.{column.digits}f}"
    return f"{shown}, {chance(p)}"


def chance(p: float | None) -> str:
    if p is None:
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"
