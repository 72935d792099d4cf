"""Running the commands of a row, a seed at a time, and keeping what they gave."""

import hashlib
import json
import os
import re
import shlex
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path

import read
from rows import ROOT, Row


# `compare` goes on by itself; `train` into a folder with checkpoints is asked to, and has what it began from in these.
RESOLVENT = """resolvent() {
    local word before= resume= words=()
    for word; do
        if [ "$1 $before" = "train --out" ] && [ -d "$word/checkpoints" ]; then resume=--resume; fi
        before=$word
    done
    before=
    for word; do
        case "$resume $word $before" in
            "--resume --from "* | "--resume "*" --from") ;;
            *) words+=("$word") ;;
        esac
        before=$word
    done
    PROGRAM "${words[@]}" $resume THREADS
}"""


class Runner:
    """Where the programs are, where they work, and where the data lie."""

    def __init__(self, programs: Path, work: Path, threads: int | None, commit: str | None):
        self.programs, self.work, self.threads = programs, work, threads
        self.commit = commit or commit_of_sources()

    def measure(self, row: Row, seed: int) -> Path:
        """Runs the commands of one seed, and keeps what they gave."""
        began = time.monotonic()
        found = self.run(row, seed)
        return self.keep(row, seed, time.monotonic() - began, found)

    def run(self, row: Row, seed: int) -> dict:
        """Runs the commands of one seed in the folder of work; the figures."""
        self.work.mkdir(parents=True, exist_ok=True)
        for name, content in row.files.items():
            (self.work / name).write_text(content + "\n", encoding="utf-8")
        with (self.work / f"{row.id}-{seed}.log").open("w", encoding="utf-8") as log:
            done = subprocess.run(
                ["bash", "-euc", self.script(row, seed)],
                cwd=self.work, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True,
            )  # fmt: skip
        if done.returncode:
            end = Path(log.name).read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
            raise RuntimeError(f"exit code {done.returncode}, see {log.name}: {' / '.join(end)}")
        return read.figures(row, seed, self.work, done.stdout)

    def script(self, row: Row, seed: int) -> str:
        """The commands with programs, data and seed put in."""
        program = shlex.quote(str(self.programs / "resolvent"))
        threads = f"--threads {self.threads}" if self.threads else ""
        lines = [f"seed={seed}", RESOLVENT.replace("PROGRAM", program).replace("THREADS", threads)]
        for command in row.commands:
            example = re.sub(r"^cargo run --release --example (\S+)(?: --)?", r"examples/\1", command)
            lines.append(f"{shlex.quote(str(self.programs))}/{example}" if example != command else placed(command))
        return "\n".join(lines)

    def keep(self, row: Row, seed: int, seconds: float, found: dict) -> Path:
        result = {
            "row": row.id,
            "seed": seed,
            "commands": list(row.commands),
            "files": row.files,
            "commit": self.commit,
            "program": self.digest(row),
            "machine": machine(self.threads),
            "date": datetime.now(UTC).date().isoformat(),
            "seconds": round(seconds, 1),
            "figures": found,
        }
        path = row.result(seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return path

    def digest(self, row: Row) -> str:
        """Which program it was: the first digits of its SHA-256."""
        example = re.search(r"--example (\S+)", row.commands[0])
        path = self.programs / (f"examples/{example[1]}" if example else "resolvent")
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]


def placed(command: str) -> str:
    """`KIND:DIR` and `DIR/NAME` as folders of RESOLVENT_DATA; `KIND:DIR/NAME` is the latter."""
    if "DIR" not in command:
        return command
    data = os.environ.get("RESOLVENT_DATA")
    if not data:
        raise RuntimeError("RESOLVENT_DATA does not name the folder of the data sets")
    data = shlex.quote(str(Path(data).resolve()))
    return re.sub(r"\bDIR/", f"{data}/", re.sub(r"([\w-]+):DIR\b(?!/)", rf"\1:{data}/\1", command))


def build(rows: list[Row]) -> Path:
    """Builds the program and the examples of some rows; the folder that they are in."""
    commands = [command for row in rows for command in row.commands]
    examples = sorted({name for command in commands for name in re.findall(r"--example (\S+)", command)})
    what = ["--bin", "resolvent", *(word for name in examples for word in ("--example", name))]
    environment = {**os.environ, "CARGO_TERM_COLOR": "never"}
    subprocess.run(["cargo", "build", "--release", "--locked", *what], cwd=ROOT, env=environment, check=True)
    return Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release"


def commit_of_sources() -> str:
    """The commit, and whether sources or recipes differ from it."""
    git = lambda *words: subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True).stdout.strip()
    changed = git("status", "--porcelain", "--", "crates", "configs", "Cargo.toml", "Cargo.lock")
    return git("rev-parse", "--short=12", "HEAD") + ("-changed" if changed else "")


def machine(threads: int | None) -> dict:
    """The processor, how many of it there are, and how many threads were asked for."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = "unknown"
    return {"processor": name, "cores": os.cpu_count(), "threads": threads or os.cpu_count()}
