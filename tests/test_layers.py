"""The package is built in layers: imports point down only, stand at the top of the file, and files stay readable."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "lanewise"

# From the bottom up. A module may import its own layer and those before it; the longest matching name counts.
LAYERS = [
    ["lanewise._gaps", "lanewise._torch_classes", "lanewise._torch_compat", "lanewise.errors"],
    ["lanewise._core"],
    ["lanewise._rules"],
    ["lanewise._transforms"],
    ["lanewise._control", "lanewise._jit", "lanewise.debug", "lanewise.nn", "lanewise.random"],
    ["lanewise.coverage", "lanewise.explain", "lanewise.testing"],
    ["lanewise"],
    ["lanewise.demo"],
]
LONGEST = 520

MODULES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = ("lanewise", *path.relative_to(PACKAGE).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> int:
    matches = [
        (len(prefix), layer)
        for layer, prefixes in enumerate(LAYERS)
        for prefix in prefixes
        if module == prefix or (module.startswith(prefix + ".") and prefix != "lanewise")
    ]
    assert matches, f"{module} belongs to no layer; add it to LAYERS"
    return max(matches)[1]


def imported(path: Path, tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of each module of the package that the file imports."""
    package = name_of(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            start = ".".join([*base, *([node.module] if node.module else [])])
            # `from lanewise._core import batch` imports a module, `from lanewise import vmap` a name of one.
            names = [f"{start}.{alias.name}" if is_module(f"{start}.{alias.name}") else start for alias in node.names]
        else:
            continue
        yield from ((node.lineno, name) for name in names if name.split(".")[0] == "lanewise")


def is_module(name: str) -> bool:
    path = PACKAGE.parent.joinpath(*name.split("."))
    return path.with_suffix(".py").exists() or path.is_dir()


def upward_imports(path: Path, source: str) -> list[str]:
    own = layer_of(name_of(path))
    return [
        f"{path.name}:{line} imports {name}" for line, name in imported(path, ast.parse(source)) if layer_of(name) > own
    ]


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path):
    assert upward_imports(path, path.read_text()) == []


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_length(path):
    assert len(path.read_text().splitlines()) <= LONGEST


def test_an_upward_import_is_found():
    level = PACKAGE / "_core" / "level.py"
    assert upward_imports(level, "from lanewise._rules import batch") == ["level.py:1 imports lanewise._rules.batch"]
    assert upward_imports(level, "from .._transforms.vmap import vmap") == [
        "level.py:1 imports lanewise._transforms.vmap"
    ]
    assert upward_imports(level, "def f():\n    import lanewise.nn") == ["level.py:2 imports lanewise.nn"]
    assert upward_imports(level, "from lanewise import vmap") == ["level.py:1 imports lanewise"]
    assert upward_imports(level, "import torch\nfrom . import plane\nfrom lanewise.errors import ArgumentError") == []


def private_torch_names(source: str) -> list[str]:
    """Dotted private names of torch that the source reads or imports, each with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            first, *rest = name.split(".")
            if (
                first == "torch"
                and rest[:1] != ["ops"]
                and any(part.startswith("_") and not part.startswith("__") for part in rest)
            ):
                found.append(f"{node.lineno}: {name}")
    return found


@pytest.mark.parametrize("path", [path for path in MODULES if not path.name.startswith("_torch_c")], ids=name_of)
def test_private_torch_names_are_in_two_files(path):
    assert private_torch_names(path.read_text()) == []


def test_a_private_torch_name_is_found():
    assert private_torch_names("import torch\nx = torch._C._foo") == ["2: torch._C._foo", "2: torch._C"]
    assert private_torch_names("from torch._ops import OpOverload") == ["1: torch._ops.OpOverload"]
    assert private_torch_names("from torch.nn import Module\nm._parameters\ntorch.ops.aten._neg_view") == []


def folders() -> list[str]:
    """The folders of the large packages that hold modules."""
    inside = [path for package in ("_core", "_control") for path in (PACKAGE / package).rglob("[!_]*.py")]
    return sorted({str(path.parent.relative_to(PACKAGE)) for path in inside})


@pytest.mark.parametrize("folder", folders())
def test_the_map_names_each_module(folder):
    """CONTRIBUTING.md names each module of the large packages, by folder."""
    text = (PACKAGE.parents[1] / "CONTRIBUTING.md").read_text()
    rows = [row for row in text.splitlines() if row.startswith(f"| `{folder}/` |")]
    assert len(rows) == 1
    named = re.findall(r"`(\w+)`", rows[0].rsplit("|", 2)[1])
    assert sorted(named) == sorted(path.stem for path in (PACKAGE / folder).glob("[!_]*.py"))
