"""Laws that hold for every function: adjoints, order of vmaps, linearity, moved dims, chunks."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lanewise import jacfwd, jacrev, jvp, vjp, vmap
from tests.cases import CASES, FIRST_DIFFERENCE, FIRST_ORDER, Case
from tests.oracles import Layout, along, assert_same, differentiable, directions, inner, of_floats, pack

pytestmark = pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
FULL = os.environ.get("LANEWISE_FULL") == "1"
SETTINGS = settings(max_examples=1500 if FULL else 120, derandomize=not FULL, deadline=None, database=None)
SEEDS = st.integers(0, 3)


def _real(case: Case) -> bool:
    lane = case.draw(1)[0]
    f, primals = of_floats(case.f, lane)
    return not any(t.is_complex() for t in (*lane, *f(*primals)))


REAL = [case for case in FIRST_DIFFERENCE if _real(case)]
cases = st.sampled_from(FIRST_ORDER)
# The gradient of an embedding leaves out the row of padding, whose tangent counts: so it is in torch.
ADJOINT = [case for case in FIRST_ORDER if case.name != "embedding_padding"]


def _packed(case: Case, seed: int, dim: int = 0, lanes: int = 3):
    drawn = case.draw(lanes, seed=seed)
    return pack(drawn, Layout(tuple(min(dim, t.dim()) for t in drawn[0]), lanes))


@SETTINGS
@given(st.sampled_from(ADJOINT), SEEDS)
def test_vjp_is_the_adjoint_of_jvp(case: Case, seed: int):
    args = case.draw(1, seed=seed)[0]
    f, primals = of_floats(case.f, args)
    v = directions(args, seed)
    out, pushed = jvp(f, primals, v)
    w = directions(out, seed + 1)
    pulled = vjp(f, *primals)[1](w)
    left = sum(inner(a, b) for a, b in zip(w, pushed, strict=True))
    assert_same(left.double(), along(pulled, v), (1e-4, 1e-5) if _single(primals) else (1e-8, 1e-9))


@SETTINGS
@given(st.sampled_from(REAL), SEEDS)
def test_forward_and_reverse_jacobians_agree(case: Case, seed: int):
    args = case.draw(1, seed=seed)[0]
    f, primals = of_floats(case.f, args)
    argnums = tuple(range(len(primals)))
    assert_same(jacfwd(f, argnums=argnums)(*primals), jacrev(f, argnums=argnums)(*primals), (1e-8, 1e-9))


@SETTINGS
@given(cases, SEEDS, st.floats(-2, 2), st.floats(-2, 2))
def test_jvp_is_linear_in_the_tangent(case: Case, seed: int, a: float, b: float):
    args = case.draw(1, seed=seed)[0]
    f, primals = of_floats(case.f, args)
    u, v = directions(args, 1), directions(args, 2)
    mixed = tuple(a * x + b * y for x, y in zip(u, v, strict=True))
    got = jvp(f, primals, mixed)[1]
    parts = zip(jvp(f, primals, u)[1], jvp(f, primals, v)[1], strict=True)
    assert_same(got, tuple(a * x + b * y for x, y in parts), (1e-3, 1e-4) if _single(primals) else (1e-8, 1e-9))


def _single(tensors) -> bool:
    return any(t.dtype in (torch.float32, torch.complex64) for t in tensors)


@SETTINGS
@given(st.sampled_from(CASES), SEEDS)
def test_vmaps_swap(case: Case, seed: int):
    lanes = case.draw(6, seed=seed)
    front = Layout(tuple(0 for _ in lanes[0]), 3)
    packed = pack([pack(lanes[:3], front), pack(lanes[3:], front)], Layout(front.in_dims, 2))
    one = vmap(vmap(case.f))(*packed)
    other = vmap(vmap(case.f, out_dims=0), in_dims=1, out_dims=1)(*packed)
    swapped = vmap(vmap(case.f), in_dims=0)(*(t.transpose(0, 1) for t in packed))
    assert_same(other, one, case.tol)
    back = swapped.transpose(0, 1) if isinstance(swapped, torch.Tensor) else tuple(t.transpose(0, 1) for t in swapped)
    assert_same(back, one, case.tol)


@SETTINGS
@given(st.sampled_from(CASES), SEEDS, st.integers(0, 2))
def test_in_dims_are_moved_dims(case: Case, seed: int, dim: int):
    packed = _packed(case, seed, dim)
    dims = tuple(min(dim, t.dim() - 1) for t in packed)
    want = vmap(case.f)(*(t.movedim(d, 0) for t, d in zip(packed, dims, strict=True)))
    assert_same(vmap(case.f, in_dims=dims)(*packed), want, case.tol)
    negative = tuple(d - t.dim() for t, d in zip(packed, dims, strict=True))
    assert_same(vmap(case.f, in_dims=negative)(*packed), want, case.tol)


@SETTINGS
@given(st.sampled_from(CASES), SEEDS)
def test_out_dims_are_moved_dims(case: Case, seed: int):
    packed = _packed(case, seed)
    want = vmap(case.f)(*packed)
    got = vmap(case.f, out_dims=-1)(*packed)
    moved = want.movedim(0, -1) if isinstance(want, torch.Tensor) else tuple(t.movedim(0, -1) for t in want)
    assert_same(got, moved, case.tol)


@SETTINGS
@given(st.sampled_from(CASES), SEEDS, st.integers(1, 6))
def test_chunks_change_nothing(case: Case, seed: int, chunk_size: int):
    packed = _packed(case, seed, lanes=5)
    assert_same(vmap(case.f, chunk_size=chunk_size)(*packed), vmap(case.f)(*packed), case.tol)


@SETTINGS
@given(st.sampled_from(REAL), SEEDS, st.integers(1, 6))
def test_chunked_jacobians_are_the_same(case: Case, seed: int, chunk_size: int):
    args = case.draw(1, seed=seed)[0]
    f, primals = of_floats(case.f, args)
    argnums = tuple(range(len(primals)))
    for transform in (jacrev, jacfwd):
        got = transform(f, argnums=argnums, chunk_size=chunk_size)(*primals)
        assert_same(got, transform(f, argnums=argnums)(*primals), (1e-9, 1e-10))


@SETTINGS
@given(cases, SEEDS)
def test_vmap_of_jvp_is_jvp_of_vmap(case: Case, seed: int):
    packed = _packed(case, seed)
    places, tangents = differentiable(packed), directions(packed, seed)
    f, primals = of_floats(vmap(case.f), packed)
    outside = jvp(f, primals, tangents)

    def one(args, tangents):
        g, primals = of_floats(case.f, args)
        return jvp(g, primals, tangents)

    inside = vmap(one, in_dims=(tuple(0 for _ in packed), tuple(0 for _ in places)))(packed, tangents)
    assert_same(inside, outside, (1e-3, 1e-4) if _single(primals) else (1e-8, 1e-9))
