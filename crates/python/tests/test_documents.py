"""The snippets of the documentation run."""

import pathlib
import re

import pytest

pytest.importorskip("torch", minversion="2.9")
pytest.importorskip("transformers")

HERE = pathlib.Path(__file__).resolve().parents[1]
PAGE = HERE.parents[1] / "docs" / "python.md"


@pytest.mark.parametrize("page", [HERE / "README.md", PAGE], ids=lambda page: page.name)
def test_snippets_run(page):
    if not page.exists():
        pytest.skip(f"{page.name} is not beside the package")
    snippets = re.findall(r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert snippets
    code = "\n".join(snippets)
    names = {"__name__": "snippets"}
    try:
        exec(compile(code, str(page), "exec"), names)
    finally:
        from resolvent.torch.takeover import _Takeover

        for report in list(_Takeover.reports):
            _Takeover.drop(report)
