"""Forward rules of linear algebra.

Where torch's formula uses the factors that an operation hands out beside its result, and that autograd holds for
constants, a derivative of the tangent would be wrong: here the tangent is a function of the operands themselves.
"""

import torch

from lanewise._core.plane import recorded
from lanewise._rules.jvp.families import (
    decomposed,
    is_constant,
    jvp_rule,
    rule_on_plane,
    torch_jvp_along,
    two_reverses,
)

aten = torch.ops.aten

# torch's forward formula is wrong for operands that are views.
two_reverses(aten.triangular_solve.default)


def _lu_tangent(a, t, lu, pivots):
    """With A = P L U and M = L^-1 P' t U^-1: L tril(M, -1) + triu(M) U"""
    p, lower, upper = torch.lu_unpack(lu, pivots) if is_constant(a) else torch.linalg.lu(a)
    m = torch.linalg.solve_triangular(lower, p.mT @ t, upper=False, unitriangular=True)
    m = torch.linalg.solve_triangular(upper, m, upper=True, left=False)
    return lower @ m.tril(-1) + m.triu() @ upper


def _trace_of_solution(a, t):
    return torch.linalg.solve_ex(a, t)[0].diagonal(0, -2, -1).sum(-1)


@rule_on_plane(aten._linalg_det.default)
def det(level, x):
    """det(A) tr(A^-1 t); a singular matrix is moved by a little, since the product has a limit there"""
    if level.tangent(x) is not None and not is_constant(level.primal(x)):
        return det_written_out(x)
    return level.pair(*level.below(_det_tangent, level, x))


def _det_tangent(level, x):
    a, t = level.primal(x), level.tangent(x)
    out = aten._linalg_det.default(a)
    if t is None:
        return out, None
    if not a.numel():
        return out, [torch.zeros_like(out[0]), torch.zeros_like(out[1]), None]
    size = a.abs().amax((-2, -1))
    # Rounding leaves a pivot of a singular matrix that is next to 0, seen beside the others of its column of U.
    upper = out[1].triu().abs()
    noise = 4 * a.shape[-1] * torch.finfo(a.dtype).eps * upper.amax(-2)
    singular = (upper.diagonal(0, -2, -1) <= noise).any(-1)
    step = torch.where(singular, torch.where(size == 0, 1, size) * 1e-8, 0).to(a.dtype)
    moved = a + step[..., None, None] * torch.eye(a.shape[-1], dtype=a.dtype, device=a.device)
    factors = _lu_tangent(a, t, out[1], out[2]) if recorded(x) else None
    return out, [torch.linalg.det(moved) * _trace_of_solution(moved, t), factors, None]


# A zero of as many factors has no derivatives of a lower order.
_MOST_ZEROS = 6


def det_written_out(a):
    """a [*N, n, n] -> the determinant [*N] with derivatives also where a is singular, LU and pivots

    With B = A + U V', regular, where U and V' span what A takes to next to nothing: det(A) = det(B) det(I - V' B^-1 U).
    The first factor is the product of pivots, the second, of a small matrix that may be 0, a polynomial. Errors are
    small beside the largest derivative of the order.
    """
    with torch.no_grad():
        fixed = a.detach()
        out, lu, pivots = aten._linalg_det.default(fixed)
        u, s, vh = torch.linalg.svd(fixed)
        size = s.amax(-1, True) if s.shape[-1] else s
        size = torch.where(size == 0, 1, size)
        u = u * (size * (s < 1e-4 * size)).unsqueeze(-2)
        few = max(a.shape[-1] - _MOST_ZEROS, 0)
        small_u, small_vh = u[..., few:], vh[..., few:, :]
    b = a + u @ vh
    p, _, upper = torch.linalg.lu(b)
    with torch.no_grad():
        sign = aten._linalg_det.default(p)[0]
    eye = torch.eye(small_u.shape[-1], dtype=a.dtype, device=a.device)
    rest = _polynomial_det(eye - small_vh @ torch.linalg.solve(b, small_u), eye)
    product = sign * upper.diagonal(0, -2, -1).prod(-1) * rest
    return out + (product - product.detach()), lu, pivots


def _polynomial_det(c, eye):
    """The last coefficient of the characteristic polynomial, by products of matrices alone"""
    n, terms, coefficient = c.shape[-1], torch.zeros_like(c), c.new_ones(c.shape[:-2])
    for k in range(1, n + 1):
        terms = c @ terms + coefficient[..., None, None] * eye
        coefficient = (c @ terms).diagonal(0, -2, -1).sum(-1) / -k
    return coefficient if n % 2 == 0 else -coefficient


@jvp_rule(aten._linalg_slogdet.default)
def slogdet(level, x):
    """tr(A^-1 t): its real part for the logarithm, its imaginary part turns the sign"""
    a, t = x.value, x.tangent
    out = aten._linalg_slogdet.default(a)
    factors = _lu_tangent(a, t, out[2], out[3]) if recorded(x) and a.numel() else None
    trace = _trace_of_solution(a, t)
    if not a.is_complex():
        return out, [None, trace, factors, None]
    return out, [out[0] * trace.imag * 1j, trace.real, factors, None]


@jvp_rule(aten._linalg_solve_ex.default)
def solve(level, a, b, *, left=True, check_errors=False):
    """A X = B: A^-1 (t_B - t_A X)"""
    pa, pb, ta, tb = level.primal(a), level.primal(b), level.tangent(a), level.tangent(b)
    out = aten._linalg_solve_ex.default(pa, pb, left=left, check_errors=check_errors)
    x, lu, pivots, _ = out
    vector = pb.dim() == 1 or (pb.dim() == pa.dim() - 1 and pb.shape == pa.shape[:-1])
    rhs = tb
    if ta is not None:
        column = x.unsqueeze(-1) if vector else x
        product = ta @ column if left else column @ ta
        product = product.squeeze(-1) if vector else product
        rhs = -product if tb is None else tb - product
    assert rhs is not None
    if is_constant(pa):
        pushed = torch.linalg.lu_solve(lu, pivots, rhs.unsqueeze(-1) if vector else rhs, left=left)
        pushed = pushed.squeeze(-1) if vector else pushed
    else:
        pushed = torch.linalg.solve(pa, rhs, left=left)
    factors = None if ta is None or not recorded(a) else _lu_tangent(pa, ta, lu, pivots)
    return out, [pushed, factors, None, None]


# Only one triangle is read, and reverse mode spreads the gradient over both; so does the mean of t and its transpose.


@jvp_rule(aten.linalg_cholesky_ex.default)
def cholesky(level, x, *, upper=False, check_errors=False):
    """Of the symmetric part of t"""
    t = (x.tangent + x.tangent.mH) / 2
    return torch_jvp_along(aten.linalg_cholesky_ex.default, (x.value,), {0: t}, upper=upper, check_errors=check_errors)


@jvp_rule(aten._linalg_eigh.default)
def eigh(level, x, UPLO="L", compute_v=True):
    """With P = V' t V of the symmetric part of t: the diagonal of P, and V (P / gaps)"""
    t = (x.tangent + x.tangent.mH) / 2
    values, vectors = aten._linalg_eigh.default(x.value, UPLO, True)
    moved = vectors.mH @ t @ vectors
    tangents = [moved.diagonal(0, -2, -1).real.clone(), vectors @ _over_gaps(moved, values) if compute_v else None]
    return (values, vectors if compute_v else vectors.new_empty(0)), tangents


def _over_gaps(moved, values):
    """P_ij / (l_j - l_i), 0 on the diagonal; the quotient that is not taken must not be infinite, either"""
    gaps = values.unsqueeze(-2) - values.unsqueeze(-1)
    same = torch.eye(values.shape[-1], dtype=torch.bool, device=values.device)
    return moved.masked_fill(same, 0) / gaps.masked_fill(same, 1)


@jvp_rule(aten.linalg_eig.default)
def eig(level, x):
    """With P = V^-1 t V: the diagonal of P, and V (P / gaps), kept at length 1"""
    values, vectors = out = aten.linalg_eig.default(x.value)
    moved = torch.linalg.solve(vectors, x.tangent.to(vectors.dtype) @ vectors)
    turned = vectors @ _over_gaps(moved, values)
    stretch = (vectors.conj() * turned).real.sum(-2, True)
    return out, [moved.diagonal(0, -2, -1).clone(), turned - vectors * stretch]


@decomposed(aten.cholesky_inverse.default)
def cholesky_inverse(x, upper=False):
    """The inverse of L L' or U' U, from the inverse of the factor"""
    eye = torch.eye(x.shape[-1], dtype=x.dtype, device=x.device)
    inverse = torch.linalg.solve_triangular(x, eye, upper=upper)
    return inverse @ inverse.mH if upper else inverse.mH @ inverse


@decomposed(aten.linalg_householder_product.default)
def householder_product(a, tau):
    """The reflections I - tau_i v_i v_i' multiplied: I - V T V', with T (I + triu(V'V, 1) D) = D of the tau"""
    m, n, k = *a.shape[-2:], tau.shape[-1]
    eye = torch.eye(m, n, dtype=a.dtype, device=a.device)
    v = a[..., :k].tril(-1) + eye[:, :k]
    scaled = (v.mH @ v).triu(1) * tau.unsqueeze(-2)
    t = torch.linalg.solve_triangular(scaled, torch.diag_embed(tau), upper=True, left=False, unitriangular=True)
    return eye - v @ t @ v[..., :n, :].mH
