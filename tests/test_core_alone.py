"""The engine runs without the rules: planes on three toy rules, in a process that loads only `_core`."""

import pathlib
import subprocess
import sys

SOURCE = pathlib.Path(__file__).parents[1] / "src" / "lanewise"

PROGRAM = """
import sys, types, warnings

package = types.ModuleType("lanewise")
package.__path__ = [SOURCE]
sys.modules["lanewise"] = package

import torch
from lanewise._core.batch import BATCH_RULES, BatchLevel
from lanewise._core.dual import JVP_RULES, DualLevel
from lanewise._core.level import live_levels
from lanewise._core.rules import Rule

aten = torch.ops.aten
assert not any(name.startswith("lanewise._rules") or name.startswith("lanewise._transforms") for name in sys.modules)
assert not BATCH_RULES and not JVP_RULES


def batch(op, run):
    BATCH_RULES.add(op, Rule(op, run, "toy"))


batch(aten.mul.Tensor, lambda level, args, kwargs: torch.mul(*map(level.physical, args)))
batch(aten.sin.default, lambda level, args, kwargs: torch.sin(level.physical(args[0])))
batch(aten.sum.default, lambda level, args, kwargs: level.expanded(args[0]).flatten(1).sum(1))

xs, w = torch.randn(4, 3), torch.randn(3, requires_grad=True)

# A plane carries operations out on all lanes, and autograd of the plane below records them.
with BatchLevel(4) as level:
    out = (level.wrap(xs) * w).sin().sum()
    assert out.shape == () and level.mapped(out)
    value = out.value
torch.testing.assert_close(value, (xs * w).sin().sum(1))
(gradient,) = torch.autograd.grad(value.sum(), w)
(expected,) = torch.autograd.grad((xs * w).sin().sum(), w)
torch.testing.assert_close(gradient, expected)

# Planes nest in the order in which they opened.
with BatchLevel(4) as outer, BatchLevel(2) as inner:
    out = inner.wrap(outer.wrap(xs.unsqueeze(1).expand(4, 2, 3))) * w
    assert inner.owns(out) and outer.owns(out.value)
    assert [outer, inner] == live_levels()
    torch.testing.assert_close(out.value.value, (xs * w).unsqueeze(1).expand(4, 2, 3))
assert not live_levels()

# An operation without a rule runs once per lane, and says so.
with BatchLevel(4) as level, warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    value = level.wrap(xs).cumsum(0).value
torch.testing.assert_close(value, xs.cumsum(1))
assert [w.category.__name__ for w in caught] == ["SlowPathWarning"], caught

# A dual plane takes torch's own formula for an operation that has no rule.
with DualLevel() as level:
    out = (level.wrap(xs, torch.ones_like(xs)) * 2).sin()
    torch.testing.assert_close(out.tangent, 2 * (2 * xs).cos())

# A second rule for an operation is refused, naming both places.
try:
    batch(aten.sin.default, lambda level, args, kwargs: None)
except ValueError as error:
    assert str(error).count("<string>") == 2, error
else:
    raise AssertionError("a second rule was accepted")
print("done")
"""


def test_core_without_rules():
    program = PROGRAM.replace("SOURCE", repr(str(SOURCE)))
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout == "done\n", done.stdout + done.stderr
