"""The snippets of the documentation run."""

import pathlib
import re

import pytest

torch = pytest.importorskip("torch", minversion="2.9")
pytest.importorskip("transformers")

HERE = pathlib.Path(__file__).resolve().parents[1]
DOCS = HERE.parents[1] / "docs"


def snippets_of(page):
    if not page.exists():
        pytest.skip(f"{page.name} is not beside the package")
    snippets = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert snippets
    return snippets


def test_a_sequence_in_one_shard_runs(monkeypatch, tmp_path):
    """The first snippet; that of groups needs the processes that it is about."""
    first = snippets_of(DOCS / "distributed.md")[0]
    distributed = torch.distributed
    begin = distributed.init_process_group
    alone = {"init_method": f"file://{tmp_path}/store", "rank": 0, "world_size": 1}
    monkeypatch.setattr(distributed, "init_process_group", lambda backend: begin(backend, **alone))
    try:
        exec(compile(first, "distributed.md", "exec"), {"__name__": "snippets"})
    finally:
        distributed.destroy_process_group()


@pytest.mark.parametrize("page", [HERE / "README.md", DOCS.parent / "README.md", DOCS / "python.md"], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_snippets_run(page):
    code = "\n".join(snippets_of(page))
    names = {"__name__": "snippets"}
    try:
        exec(compile(code, str(page), "exec"), names)
    finally:
        from resolvent.torch.takeover import _Takeover

        for report in list(_Takeover.reports):
            _Takeover.drop(report)
