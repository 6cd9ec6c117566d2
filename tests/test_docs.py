"""The README, the docs and the docstrings say what is so: their code runs, and every public name is documented."""

import doctest
import importlib
import inspect
import operator
import pkgutil
import re
from pathlib import Path

import pytest

import lanewise

# The pages are for users, whose light functions may run in a loop first.
pytestmark = pytest.mark.loops

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def code_blocks(page: Path) -> list[tuple[int, str]]:
    """The first line and the text of each Python block."""
    text = page.read_text()
    return [(text[: match.start()].count("\n") + 2, match.group(1)) for match in BLOCK.finditer(text)]


def run_examples(source: str, names: dict, name: str, line: int) -> None:
    test = doctest.DocTestParser().get_doctest(source, names, name, name, line - 1)
    report: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append, clear_globs=False)
    names.update(test.globs)
    assert result.failed == 0, "".join(report)


@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page)], ids=name_of)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch):
    """The blocks of a page are one program; a block with `>>>` shows what it prints."""
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "__main__"}
    for line, source in code_blocks(page):
        if source.startswith(">>>"):
            run_examples(source, names, name_of(page), line)
        else:
            exec(compile("\n" * (line - 1) + source, name_of(page), "exec"), names)


def modules() -> list[str]:
    found = pkgutil.walk_packages(lanewise.__path__, "lanewise.")
    return ["lanewise", *(module.name for module in found if not module.name.startswith("lanewise.demo"))]


@pytest.mark.parametrize("module", modules())
def test_the_docstrings_of_a_module_run(module):
    for test in doctest.DocTestFinder(exclude_empty=True).find(importlib.import_module(module)):
        report: list[str] = []
        result = doctest.DocTestRunner(optionflags=FLAGS).run(test, out=report.append)
        assert result.failed == 0, "".join(report)


@pytest.mark.parametrize(
    "name",
    [*lanewise.__all__, "map", "random", "errors", "debug", *(f"random.{name}" for name in lanewise.random.__all__)],
)
def test_a_public_name_is_documented(name):
    value = operator.attrgetter(name)(lanewise)
    text = inspect.getdoc(value) or ""
    summary, _, rest = text.partition("\n")
    assert summary.endswith("."), "one line of summary"
    if inspect.isfunction(value):
        assert "Args:" in rest, "arguments"
        assert "Returns:" in rest, "result"
        assert ">>>" in rest, "an example that runs"
        for parameter in (name for name in inspect.signature(value).parameters if not name.startswith("_")):
            assert re.search(rf"^\s+(\w+, )*\**{parameter}\b.*:", rest, re.MULTILINE), f"{parameter} is not described"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_inside_the_repository_exist(page):
    for target in re.findall(r"\]\((?!https?://|#)([^)#]+)", page.read_text()):
        assert (page.parent / target).exists(), target


def test_the_version_stands_in_one_place():
    assert re.fullmatch(r"\d+\.\d+\.\d+", lanewise.__version__)
    assert f"\n## {lanewise.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and 'path = "src/lanewise/__init__.py"' in project
