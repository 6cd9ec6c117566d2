"""The engine is our own: nothing in the package reaches torch's function transforms, in its text or when it runs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "lanewise"
FORBIDDEN = re.compile(r"\b(functorch|_functorch|_vmap_internals|torch\.func)\b|torch\.vmap\b")
# Asks whether torch's own transforms are running, to refuse the mixture; it drives nothing.
ALLOWED = "_are_functorch_transforms_active"
# The demo measures against the peer, as the tests and benchmarks do; the library does not import it.
PEER_USERS = {"demo"}


def peer_names(source: str) -> list[str]:
    """Where the code (not its comments and docstrings) names torch's engine, outside `is_compiling()` branches."""
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("is_compiling()"):
            skipped.update(id(inner) for statement in node.body for inner in ast.walk(statement))
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            skipped.add(id(node.value))
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Name):
            names = [node.id]
        else:
            continue
        found += [f"{node.lineno}: {name}" for name in names if FORBIDDEN.search(name)]
    return found


def library_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if path.relative_to(PACKAGE).parts[0] not in PEER_USERS]


@pytest.mark.parametrize("path", library_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_names_the_peer(path):
    assert peer_names(path.read_text()) == []


def test_the_search_finds_what_it_should():
    assert peer_names("import torch.func") == ["1: torch.func"]
    assert peer_names("from torch import func as f") == ["1: torch.func"]
    assert peer_names("from torch._functorch import apis") == ["1: torch._functorch.apis"]
    assert peer_names("import torch\ntorch.vmap(f)") == ["2: torch.vmap"]
    assert peer_names("import torch\nx = torch._C._functorch.get_unwrapped(x)")[0].startswith("2: torch._C._functorch")
    assert peer_names("import functorch") == ["1: functorch"]
    assert peer_names('"""Like torch.func."""\nimport torch.nn.functional\ntorch.functional.norm') == []
    assert peer_names(f"import torch\nactive = torch._C.{ALLOWED}") == []
    assert peer_names("if torch.compiler.is_compiling():\n    torch.func.vmap(f)") == []
    assert peer_names("if torch.compiler.is_compiling():\n    pass\nelse:\n    torch.func.vmap(f)") == [
        "4: torch.func.vmap",
        "4: torch.func",
    ]


# Replaces every function of torch's engine by one that raises; RUN below then uses all transforms.
BLOCK = """
import importlib
import types

import torch

MODULES = [
    importlib.import_module(name)
    for name in (
        "torch._C._functorch", "torch._functorch.apis", "torch._functorch.eager_transforms", "torch._functorch.vmap",
        "torch._functorch.functional_call", "torch._functorch.batch_norm_replacement", "torch._vmap_internals",
        "torch.func", *(["torch._functorch.einops"] if torch.__version__ >= (2, 13) else []),
    )
]
OWN = {module.__name__ for module in MODULES}
# torch itself asks this of every argument of a plain autograd.Function.
PLAIN_TORCH_USES = {"unwrap_if_dead"}
blocked = 0


def refusing(where):
    def refuse(*args, **kwargs):
        raise AssertionError(f"torch's engine was called: {where}")

    return refuse


for module in MODULES:
    for name, value in list(vars(module).items()):
        function = callable(value) and not isinstance(value, type)
        if function and value.__module__ in OWN and name not in PLAIN_TORCH_USES:
            setattr(module, name, refusing(f"{module.__name__}.{name}"))
            blocked += 1
torch.vmap = torch.func.vmap
assert blocked > 60, blocked
for name in ("_vmap_increment_nesting", "_grad_increment_nesting", "_jvp_increment_nesting"):
    try:
        getattr(torch._C._functorch, name)()
    except AssertionError:
        continue
    raise SystemExit(f"{name} is not blocked")
"""

RUN = """
import warnings
import lanewise as lw

warnings.simplefilter("error")
torch.manual_seed(0)
xs, w = torch.randn(3, 4), torch.randn(4, requires_grad=True)

def loss(x, w):
    return (x * w).sin().sum()

def close(a, b):
    torch.testing.assert_close(a, b)

close(lw.vmap(loss, in_dims=(0, None))(xs, w), (xs * w).sin().sum(-1))
close(lw.vmap(lw.grad(loss, argnums=1), in_dims=(0, None))(xs, w), (xs * w).cos() * xs)
close(lw.grad(lambda w: lw.vmap(loss, in_dims=(0, None))(xs, w).sum())(w), ((xs * w).cos() * xs).sum(0))
lw.vmap(loss, in_dims=(0, None))(xs, w).sum().backward()
close(w.grad, ((xs * w).cos() * xs).sum(0).detach())
w = w.detach()

x = xs[0]
out, pull = lw.vjp(torch.sin, x)
close(pull(torch.ones(4))[0], x.cos())
close(lw.jvp(torch.sin, (x,), (torch.ones(4),))[1], x.cos())
close(lw.vmap(lambda x: lw.jvp(torch.sin, (x,), (torch.ones(4),))[1])(xs), xs.cos())
close(lw.linearize(torch.sin, x)[1](torch.ones(4)), x.cos())
close(lw.jacrev(torch.sin)(x), x.cos().diag())
close(lw.jacfwd(torch.sin)(x), x.cos().diag())
close(lw.hessian(lambda x: x.sin().sum())(x), (-x.sin()).diag())
close(lw.vmap(lw.hessian(lambda x: x.sin().sum()))(xs), torch.diag_embed(-xs.sin()))
close(lw.grad_and_value(loss)(x, w)[1], loss(x, w))
close(lw.value_and_grad(loss)(x, w)[0], loss(x, w))
close(lw.functionalize(lambda x: x.clone().add_(1))(x), x + 1)
close(lw.rearrange(xs, "a b -> b a"), xs.T)
close(lw.vmap(lambda x: torch.nn.functional.dropout(x, 0.0), randomness="different")(xs), xs)

class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, g):
        return 2 * ctx.saved_tensors[0] * g

close(lw.vmap(lw.grad(lambda x: Square.apply(x).sum()))(xs), 2 * xs)

models = [torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)) for _ in range(2)]
params, buffers = lw.stack_module_state(models)
run = lambda params, buffers, x: lw.functional_call(models[0], (params, buffers), x)
close(lw.vmap(run, in_dims=(0, 0, None))(params, buffers, xs), torch.stack([m(xs) for m in models]))
lw.replace_all_batch_norm_modules_(torch.nn.Sequential(torch.nn.BatchNorm1d(4)))
print("all ran")
"""


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=300)


def test_no_transform_calls_the_peer():
    result = run_python(BLOCK + RUN)
    assert result.stdout.strip() == "all ran", result.stderr[-3000:]


@pytest.mark.parametrize("call", ["torch.func.grad(torch.sum)(torch.ones(2))", "torch.vmap(torch.sin)(torch.ones(2))"])
def test_the_block_bites(call):
    result = run_python(BLOCK + call)
    assert "torch's engine was called" in result.stderr


def test_importing_the_package_does_not_import_functorch():
    result = run_python("import sys, lanewise; print('functorch' in sys.modules)")
    assert result.stdout.strip() == "False", result.stderr[-3000:]
