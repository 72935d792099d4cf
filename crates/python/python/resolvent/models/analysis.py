"""The token graphs of a model, and which mechanism could stand in place of its attention: ``resolvent analyze`` from Python."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shlex
import shutil
import subprocess
from typing import Any, Literal, Mapping, Sequence

from torch import nn

from ..errors import ConfigurationError, Error, UnsupportedError
from ..fits import Fit, load_fit
from ..mechanism import Mechanism, MechanismLike
from ..mechanism import mechanisms as presets
from . import dump
from .given import Given
from .layers import Layer, Layers, find, select
from .recording import recording, show

__all__ = ["Analysis", "analyze"]

_DUMP = "dump.safetensors"
_FIT = "fit.json"


@dataclasses.dataclass
class Analysis:
    """What has been written and, where the program was there, what it has found."""

    path: pathlib.Path
    """The file of queries, keys and values."""
    command: tuple[str, ...]
    """What analyses it."""
    layers: tuple[str, ...]
    results: dict[str, Any] | None = None
    """The program's results, as in ``results.json``; ``None`` where there was no program."""
    report: pathlib.Path | None = None
    """The report, a page for a browser."""
    fit: Fit | None = None
    """The mechanism of every head, where a fit was asked for; also in ``fit.json`` beside the report."""

    def __str__(self) -> str:
        if self.results is None:
            return f"{len(self.layers)} layers in {self.path}; analyse them by\n{shlex.join(self.command)}"
        if self.fit is not None:
            return f"{self.fit}\nreport: {self.report}"
        rows = [(verdict["name"], verdict["finding"], verdict["sentence"]) for verdict in self.results["verdicts"]]
        widths = [max(len(row[n]) for row in rows) for n in (0, 1)]
        lines = [f"{name.ljust(widths[0])}  {finding.ljust(widths[1])}  {sentence}" for name, finding, sentence in rows]
        return "\n".join([*lines, f"report: {self.report}"])


def analyze(
    model: nn.Module,
    inputs: Any,
    out: str | os.PathLike[str] = "runs/analyze",
    *,
    layers: Layers = None,
    mechanisms: Sequence[str] | Mapping[str, MechanismLike] | None = None,
    full: bool = False,
    fit: float | None = None,
    measure: Literal["cosine", "error"] = "cosine",
    cost: Literal["time", "operations"] = "time",
    budget: float | None = None,
    program: str | os.PathLike[str] | None = None,
) -> Analysis:
    """Shows inputs to a model, writes what its attention is given to a file, and has the program `resolvent` analyse it.

    Args:
        model: One of Hugging Face transformers that leaves attention to an implementation, or one that holds
            ``torch.nn.MultiheadAttention`` or modules of this package. It is run in evaluation and left as it was.
        inputs: A tensor, a tuple of arguments, a mapping of keywords, or several of these in a list.
        out: The folder for the file ``dump.safetensors`` and the program's results.
        layers: Which layers, as in `convert`.
        mechanisms: Presets by their ids, or mechanisms by names of one's own; all presets by default.
        full: Adds what takes long: dense spectra, paths from every token, mixing times.
        fit: In place of the analysis, finds the cheapest mechanism for every head whose output reaches this against softmax's; see `convert`.
            ``mechanisms`` are then what is tried.
        measure: What `fit` is of: ``cosine``, 0 to 1 and at least, or ``error``, the length of the difference over that of softmax's output,
            at most.
        cost: What the fit saves: ``time`` on this machine, or ``operations``.
        budget: The share of dense softmax's cost that all heads together may take; for it heads leave the target. No limit by default.
        program: The program's path. Where it is not given, ``resolvent`` is looked for; where there is none, the result has
            the command and no results.

    Raises:
        ConfigurationError: for a fit that is asked for beside ``full``, and a budget beside no fit.
        UnsupportedError: for models without attention that is known, and for calls that such a file cannot hold.
    """
    asked = _asked(fit, measure, cost, budget, full)
    chosen = select(find(model), layers)
    calls = _recorded(model, chosen, inputs)
    causal = _causality(calls)
    folder = pathlib.Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / _DUMP
    dump.write(path, (item for name, given in calls.items() for item in dump.tensors(name, given).items()))
    found = _program(program)
    command = [found or "resolvent", "analyze", "--input", str(path), "--out", str(folder)]
    command += ["--causal"] if causal else []
    command += ["--full"] if full else []
    command += asked
    if mechanisms is not None:
        command += ["--mechanisms", ",".join(_candidates(folder, mechanisms))]
    analysis = Analysis(path, tuple(command), tuple(calls))
    if found is not None:
        analysis.results = _run(command)
        analysis.report = folder / "report.html"
        analysis.fit = load_fit(folder / _FIT) if fit is not None else None
    return analysis


def _asked(fit: float | None, measure: str, cost: str, budget: float | None, full: bool) -> list[str]:
    """The program's arguments for a fit."""
    if fit is None and budget is None:
        return []
    if fit is None or full:
        field = "budget" if fit is None else "full"
        remedy = "pass the target as `fit`" if fit is None else "leave it out"
        message = f"argument `{field}` is beside {'no fit' if fit is None else 'a fit'}; {remedy}"
        raise ConfigurationError(message, code="argument", field=field, remedy=remedy)
    return ["--fit", str(fit), "--measure", measure, "--cost", cost, *([] if budget is None else ["--budget", str(budget)])]


def _recorded(model: nn.Module, layers: list[Layer], inputs: Any) -> dict[str, list[Given]]:
    """The calls of every layer; of one that is called several times for an input, by the number of the call."""
    passes: list[dict[str, list[Given]]] = []

    def take(layer: Layer, given: Given) -> None:
        _honour(layer, given)
        passes[-1].setdefault(layer.name, []).append(given)

    several = inputs if isinstance(inputs, list) and inputs else [inputs]
    with recording(model, layers, take):
        for one in several:
            passes.append({})
            show(model, one)
    calls: dict[str, list[Given]] = {}
    for taken in passes:
        for name, given in taken.items():
            for n, call in enumerate(given):
                calls.setdefault(name if len(given) == 1 else f"{name}.{n}", []).append(call)
    if not calls:
        remedy = "choose layers that the model calls on these inputs"
        raise ConfigurationError(f"no layer has attended; {remedy}", code="argument", field="layers", remedy=remedy)
    return calls


def _honour(layer: Layer, given: Given) -> None:
    """Refuses what the file has no place for."""
    what = "a mask or a bias of single pairs" if given.pairs is not None else None
    what = "a sliding window" if given.window is not None else what
    what = f"`{given.options[0]}`" if given.options else what
    if what is None:
        return
    why = "a file of queries, keys and values has no place for it; choose other layers"
    raise UnsupportedError(f"layer `{layer.name}`: {what} is not supported: {why}", code="unsupported", field=layer.name, remedy=why)


def _causality(calls: dict[str, list[Given]]) -> bool:
    found = {given.causal for several in calls.values() for given in several}
    if len(found) > 1:
        remedy = "choose by `layers` those that see later tokens, or those that do not"
        raise UnsupportedError(
            f"layers that are causal beside ones that are not are not supported; {remedy}", code="unsupported", field="layers", remedy=remedy
        )
    return found.pop()


def _candidates(folder: pathlib.Path, mechanisms: Sequence[str] | Mapping[str, MechanismLike]) -> list[str]:
    """Ids as they are, mechanisms as files that have their names."""
    if not isinstance(mechanisms, Mapping):
        ids = [mechanisms] if isinstance(mechanisms, str) else list(mechanisms)
        if unknown := [name for name in ids if name not in presets()]:
            remedy = "name presets, or pass a mapping of names of your own to mechanisms"
            message = f"argument `mechanisms` has {unknown[0]!r}, which is no preset; {remedy}"
            raise ConfigurationError(message, code="argument", field="mechanisms", remedy=remedy)
        return ids
    files = []
    for name, mechanism in mechanisms.items():
        if not name or set(name) & set("/\\,"):
            remedy = "a name is a file's, without commas"
            raise ConfigurationError(f"argument `mechanisms` names {name!r}; {remedy}", code="argument", field="mechanisms", remedy=remedy)
        file = folder / f"{name}.json"
        file.write_text(Mechanism.of(mechanism).to_json(), encoding="utf-8")
        files.append(str(file))
    return files


def _program(program: str | os.PathLike[str] | None) -> str | None:
    if program is None:
        return shutil.which("resolvent")
    found = shutil.which(os.fspath(program))
    if found is None:
        remedy = "pass the path of an executable file, or leave it out"
        message = f"argument `program` is {os.fspath(program)!r}, which is no program; {remedy}"
        raise ConfigurationError(message, code="argument", field="program", remedy=remedy)
    return found


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run([*command, "--json", "--quiet"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        message = done.stderr.strip() or f"{command[0]} ended with exit code {done.returncode}"
        raise Error(message, code="program", remedy=f"run it by hand: {shlex.join(command)}")
    results: dict[str, Any] = json.loads(done.stdout)
    return results
