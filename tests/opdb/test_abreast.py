"""The rules of lanes that stay abreast, where they answer, on the samples of op_db: as torch for each lane."""

import itertools
import os
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

from lanewise._control.abreast import networks  # noqa: F401
from lanewise._control.abreast.values import FUNCTIONS, METHODS, Declined, Lanes

FULL = bool(os.environ.get("LANEWISE_FULL"))

DTYPES = (torch.float64, torch.int64, torch.float32, torch.bool, torch.complex128, torch.float16)[: None if FULL else 2]
MOST = 60 if FULL else 4
# All samples of these are declined.
DECLINED = frozenset(
    "clamp Tensor.clamp flip Tensor.flip nn.functional.pad.reflect nn.functional.pad.replicate "
    "nn.functional.pad.replicate_negative nn.functional.pad.circular Tensor.to norm.nuc Tensor.norm.nuc norm.inf "
    "Tensor.norm.inf std.unbiased Tensor.std.unbiased var.unbiased Tensor.var.unbiased linalg.norm "
    "linalg.norm.subgradients_at_zero".split()
)


def _rules() -> dict[str, tuple[Any, Callable, Callable]]:
    """By name: the OpInfo, torch's own, and the rule; functions, and methods as `Tensor.name`."""
    found = {}
    for op in op_db:
        function = op.get_op()
        name = op.name + (f".{op.variant_test_name}" if op.variant_test_name else "")
        if function in FUNCTIONS:
            found[name] = op, function, FUNCTIONS[function]
        if op.method_variant is not None and op.name in METHODS:
            found[f"Tensor.{name}"] = op, op.method_variant, METHODS[op.name]
    return found


RULES = _rules()


def _other(t: Tensor) -> Tensor:
    """Another tensor of this shape and dtype, for which an operation is as well defined."""
    return t.flip(tuple(range(t.dim()))) if t.dim() else t.clone()


def _mapped(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(each, change) for each in value)
    return value


def _tensors(value: Any) -> list[Tensor]:
    found: list[Tensor] = []
    _mapped(value, found.append)
    return found


def _leaves(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _result(call: Callable, args: Any, kwargs: dict) -> list[Any] | Exception:
    try:
        return _leaves(call(*args, **kwargs))
    except Declined:
        raise
    except Exception as error:
        return error


def _check(function: Callable, rule: Callable, args: list, kwargs: dict, which: tuple[bool, ...]) -> bool:
    """Whether the rule answers; `which` of the tensors have lanes."""
    numbers = itertools.count()
    lanes = iter(which)
    # Each tensor twice: as it is, and another one where it has lanes.
    pairs = {
        next(numbers): (t.detach(), _other(t.detach()) if has else t.detach()) for t, has in zip(_tensors(args), lanes)
    }
    wants = []
    for lane in range(2):
        count = itertools.count()
        given = _mapped(args, lambda _, lane=lane, count=count: pairs[next(count)][lane].clone())
        wants.append(_result(function, given, kwargs))
    count, lanes = itertools.count(), iter(which)
    given = _mapped(
        args, lambda _: Lanes(torch.stack(pairs[next(count)])) if next(lanes) else pairs[next(count)][0].clone()
    )
    try:
        found = _result(rule, given, kwargs)
    except Declined:
        return False
    if isinstance(found, Exception):
        return False  # the call takes a plane
    assert not any(isinstance(want, Exception) for want in wants), wants
    first, second = wants
    assert len(found) == len(first)  # type: ignore[arg-type]
    for out, *rows in zip(found, first, second):  # type: ignore[arg-type]
        if not isinstance(out, Lanes):
            assert all(type(row) is type(out) for row in rows)
            if isinstance(out, Tensor):
                assert all(torch.equal(row, out) and row.dtype is out.dtype for row in rows)
            else:
                assert rows == [out, out]
            continue
        want = torch.stack(rows)
        assert out.value.dtype is want.dtype and out.value.shape == want.shape, (out.value.shape, want.shape)
        tolerance = {torch.float16: 2e-2, torch.float32: 1e-4}.get(want.dtype, 1e-8)
        torch.testing.assert_close(out.value, want, equal_nan=True, rtol=tolerance, atol=tolerance)
    return True


@pytest.mark.parametrize("name", RULES)
def test_a_rule_equals_torch_for_each_lane(name: str) -> None:
    op, function, rule = RULES[name]
    answered = 0
    for dtype in DTYPES:
        if not op.supports_dtype(dtype, "cpu"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
            random.Random(0).shuffle(samples)
            for sample in samples[:MOST]:
                args = [sample.input, *sample.args]
                tensors = len(_tensors(args))
                patterns = {(True,) * tensors, (True, *[False] * (tensors - 1)), (False, *[True] * (tensors - 1))}
                for which in sorted(each for each in patterns if any(each)):
                    try:
                        answered += _check(function, rule, args, sample.kwargs, which)
                    except AssertionError as error:
                        shapes = [(list(t.shape), t.dtype) for t in _tensors(args)]
                        raise AssertionError(f"{shapes} {sample.args} {sample.kwargs} {which}: {error}") from None
    assert answered or name in DECLINED or not op.supports_dtype(torch.float64, "cpu")
