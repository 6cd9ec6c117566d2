"""Linear algebra: factorisations and solves. Matrices are the last two dims; anything in front is batch."""

import torch
from torch import Tensor

from lanewise._core.batch import BatchLevel, BatchTensor
from lanewise._core.python.factories import route as route_factory
from lanewise._core.short.hot import route
from lanewise._rules.batch.families import lane_rule, leading, too_few_dims
from lanewise._rules.batch.operands import at_hand
from lanewise._rules.batch.tracking import is_tracked
from lanewise._torch_compat import cast_as_called, fast_binding
from lanewise.errors import TransformError, at_user_line

aten = torch.ops.aten

leading(
    aten._linalg_eigh.default,
    aten._linalg_eigvals.default,
    aten._linalg_svd.default,
    aten.cholesky_inverse.default,
    aten.geqrf.default,
    aten.linalg_cholesky_ex.default,
    aten.linalg_eig.default,
    aten.linalg_householder_product.default,
    aten.linalg_inv_ex.default,
    aten.linalg_ldl_factor_ex.default,
    aten.linalg_lu.default,
    aten.linalg_lu_factor_ex.default,
    aten.linalg_qr.default,
    aten.ormqr.default,
    # torch 2.14 has done without it.
    *[op for op in [getattr(getattr(aten, "cholesky", None), "default", None)] if op is not None],
    least=2,
)


@lane_rule(aten.linalg_matrix_exp.default)
def matrix_exp(level, x):
    """x [B, *S, n, n] -> the same; the kernel takes views that only a dense batch has"""
    if x.dim() < 2:
        raise too_few_dims(aten.linalg_matrix_exp.default, x, 2)
    return aten.linalg_matrix_exp.default(x.value.contiguous())


# --- operands whose batch dims broadcast -----------------------------------------------------------------------------


def broadcast_batch(level: BatchLevel, *operands: tuple[Tensor, int]) -> list[Tensor]:
    """Operands given with their number of core dims, so that their batch dims broadcast below as they do here.

    Mapped operands get dims of size 1 between the lanes and their own batch dims; the others stay as they are.
    """
    batch = max(tensor.dim() - core for tensor, core in operands)
    aligned = []
    for tensor, core in operands:
        value = level.physical(tensor)
        missing_dims = batch - (tensor.dim() - core)
        if level.mapped(tensor) and missing_dims:
            value = value.reshape(level.size, *([1] * missing_dims), *value.shape[1:])
        aligned.append(value)
    return aligned


def same_batch(level: BatchLevel, *operands: tuple[Tensor, int]) -> list[Tensor]:
    """Operands with core dims, all expanded to one batch shape `[B, *batch]`."""
    aligned = broadcast_batch(level, *operands)
    cores = [core for _, core in operands]
    shapes = [value.shape[: value.dim() - core] for value, core in zip(aligned, cores, strict=True)]
    if all(shape == shapes[0] for shape in shapes[1:]) and any(level.mapped(operand) for operand, _ in operands):
        return aligned
    batch = torch.broadcast_shapes((level.size,) + (1,) * max(t.dim() - c for t, c in operands), *shapes)
    return [
        value.expand(*batch, *value.shape[value.dim() - core :]) for value, core in zip(aligned, cores, strict=True)
    ]


def fold_into_columns(level: BatchLevel, rhs: Tensor, left: bool) -> Tensor:
    """rhs [B, *batch, n, k] -> [*batch, n, k * B] (`[*batch, B * n, k]` if not `left`): one solve for all lanes."""
    if left:
        return rhs.movedim(0, -1).flatten(-2)
    return rhs.movedim(0, -3).flatten(-3, -2)


def unfold_columns(level: BatchLevel, solution: Tensor, left: bool) -> Tensor:
    """The inverse of `fold_into_columns` on the solution."""
    if left:
        return solution.unflatten(-1, (solution.shape[-1] // max(level.size, 1), level.size)).movedim(-1, 0)
    return solution.unflatten(-2, (level.size, solution.shape[-2] // max(level.size, 1))).movedim(-3, 0)


def solve_rule(op, core_dims):
    """A solve `op(*operands, **options)` whose last operand by `core_dims` is the right-hand side.

    `core_dims` gives the core dims of each tensor operand in order, the right-hand side as -2. Where only it has
    lanes, they become columns and the matrix is factored, expanded or copied for none of them.
    """
    at_rhs = core_dims.index(-2)

    @lane_rule(op)
    def solve(level, *args, **options):
        operands, rest = list(args[: len(core_dims)]), args[len(core_dims) :]
        for operand, core in zip(operands, core_dims, strict=True):
            if operand.dim() < abs(core):
                raise too_few_dims(op, operand, abs(core))
        left = options.get("left", True)
        if level.size > 0 and not any(level.mapped(t) for i, t in enumerate(operands) if i != at_rhs):
            operands[at_rhs] = fold_into_columns(level, operands[at_rhs].value, left)
            return unfold_columns(level, op(*operands, *rest, **options), left)
        aligned = same_batch(level, *[(t, abs(core)) for t, core in zip(operands, core_dims, strict=True)])
        if 1 in core_dims:  # pivots beside their factors
            aligned = [_dense_batch(t, abs(core)) for t, core in zip(aligned, core_dims, strict=True)]
        return op(*aligned, *rest, **options)

    return solve


def _dense_batch(value: Tensor, core: int) -> Tensor:
    """Factors [*batch, *core] whose batch lies matrix after matrix; the kernels step by the last stride of the batch.

    torch calls a dim of size 1 contiguous whatever its stride.
    """
    step = value.shape[value.dim() - core :].numel()
    for dim in range(value.dim() - core - 1, -1, -1):
        if value.stride(dim) != step:
            return value.clone(memory_format=torch.contiguous_format)
        step *= value.shape[dim]
    return value


solve_rule(aten.linalg_solve_triangular.default, (2, -2))
solve_rule(aten.linalg_lu_solve.default, (2, 1, -2))
solve_rule(aten.linalg_ldl_solve.default, (2, 1, -2))
solve_rule(aten.cholesky_solve.default, (-2, 2))


@lane_rule(aten.triangular_solve.default)
def triangular_solve(level, rhs, a, upper=True, transpose=False, unitriangular=False):
    """rhs [B, *batch, n, k], a [B, *batch, n, n] -> solution and a copy of a"""
    rhs, a = same_batch(level, (rhs, 2), (a, 2))
    return aten.triangular_solve(rhs, a, upper, transpose, unitriangular)


# --- LU factors that backward formulas save --------------------------------------------------------------------------


def differentiable_factors(matrix: Tensor, factors: list[Tensor]) -> list[Tensor]:
    """LU and pivots of a matrix, with a derivative where somebody below may want one.

    torch gives the factors that it saves none: with grad mode on, its backward formulas do without them. On this plane
    a backward pass runs with grad mode off and takes them, while the plane below may be recording.
    """
    if not is_tracked(matrix):
        return factors
    lu, pivots, _ = torch.linalg.lu_factor_ex(matrix)
    return [lu, pivots, *factors[2:]]


def _factored(op):
    @lane_rule(op)
    def determinant(level, a):
        """a [B, *batch, n, n] -> the determinant, or its sign and logarithm, then LU and pivots

        torch's kernel factors the transpose of a contiguous real matrix, and the backward formula asks again whether
        the matrix is contiguous, but asks the one that it saved, which is of this plane.
        """
        if a.dim() < 2:
            raise too_few_dims(op, a, 2)
        value = a.value.contiguous() if a.is_contiguous() else a.value
        *out, lu, pivots = op(value)
        transposed = a.is_contiguous() and not a.is_complex()
        return (*out, *differentiable_factors(value.mT if transposed else value, [lu, pivots]))


_factored(aten._linalg_det.default)
_factored(aten._linalg_slogdet.default)


_solve_ex = fast_binding(aten._linalg_solve_ex.default)


@lane_rule(aten._linalg_solve_ex.default)
def solve_ex(level, a, b, *, left=True, check_errors=False):
    """a [B, *batch, n, n], b [B, *batch, n, k] or one vector for each matrix [B, *batch, n] -> x, LU, pivots, info

    Whether b holds vectors is decided by the logical shapes: below, a batch of vectors looks like a matrix.
    """
    if a.dim() == 2 and left and b.dim() in (1, 2) and level.mapped(a) and level.mapped(b):
        one = b.dim() == 1
        x, *factors = _solve_ex(a.value, b.value.unsqueeze(-1) if one else b.value, check_errors=check_errors)
        return (x.squeeze(-1) if one else x, *differentiable_factors(a.value, factors))
    vectors = b.dim() == 1 or (a.dim() - 1 == b.dim() and b.shape == a.shape[:-1])
    rhs, rhs_dims = level.physical(b), b.dim()
    if vectors and left:
        rhs, rhs_dims = rhs.unsqueeze(-1), rhs_dims + 1
    options = {"left": left, "check_errors": check_errors}
    matrix = level.physical(a)
    if level.size > 0 and not level.mapped(a):
        x, *factors = aten._linalg_solve_ex(matrix, fold_into_columns(level, rhs, left), **options)
        x = unfold_columns(level, x, left)
        factors = [t.expand(level.size, *t.shape) for t in differentiable_factors(matrix, factors)]
    else:
        batch = max(a.dim(), rhs_dims) - 2
        padded = _pad_batch(level, matrix, a.dim() - 2, batch) if level.mapped(a) else matrix
        rhs = _pad_batch(level, rhs, rhs_dims - 2, batch) if level.mapped(b) else rhs
        if rhs.dim() == 2:
            rhs = rhs.expand(*padded.shape[:-2], *rhs.shape)
        elif rhs.shape[:-2] != padded.shape[:-2]:
            rhs = rhs.expand(*torch.broadcast_shapes(rhs.shape[:-2], padded.shape[:-2]), *rhs.shape[-2:])
        x, *factors = aten._linalg_solve_ex(padded, rhs, **options)
        if padded is not matrix:
            lu, pivots, info = factors
            own = matrix.shape[:-2]
            factors = [lu.reshape(matrix.shape), pivots.reshape(*own, a.shape[-1]), info.reshape(own)]
        factors = differentiable_factors(matrix, factors)
        factors = [t if level.mapped(a) else t.expand(level.size, *t.shape) for t in factors]
    return (x.squeeze(-1) if vectors and left else x, *factors)


def _pad_batch(level, value, has, wants):
    return value if has == wants else value.reshape(level.size, *([1] * (wants - has)), *value.shape[1:])


@lane_rule(aten.lu_unpack.default)
def lu_unpack(level, lu, pivots, unpack_data=True, unpack_pivots=True):
    """lu [B, *batch, m, n], pivots [B, *batch, min(m, n)] -> P, L, U; the kernel does not check these shapes"""
    if lu.dim() < 2 or pivots.shape != (*lu.shape[:-2], min(lu.shape[-2:])):
        raise TransformError(
            at_user_line(
                f"torch.lu_unpack: LU_data {list(lu.shape)} needs LU_pivots "
                f"{[*lu.shape[:-2], min(lu.shape[-2:], default=0)]}, got {list(pivots.shape)}"
            )
        )
    out = torch.lu_unpack(level.expanded(lu), level.expanded(pivots), unpack_data, unpack_pivots)
    return tuple(t if t.dim() == lu.dim() + 1 else t.expand(level.size, *t.shape) for t in out)


@lane_rule(aten.linalg_pinv.atol_rtol_tensor)
def pinv(level, a, *, atol=None, rtol=None, hermitian=False):
    """a [B, *batch, m, n], atol and rtol [B, *batch] -> [B, *batch, n, m]"""
    if a.dim() < 2:
        raise too_few_dims(aten.linalg_pinv.atol_rtol_tensor, a, 2)
    given = [(t, core) for t, core in ((a, 2), (atol, 0), (rtol, 0)) if t is not None]
    aligned = iter(broadcast_batch(level, *given))
    matrix = next(aligned)
    atol = next(aligned) if atol is not None else None
    rtol = next(aligned) if rtol is not None else None
    matrix = matrix if level.mapped(a) else matrix.expand(level.size, *matrix.shape)
    # The kernel asks torch for products, which autocast casts as those of one example.
    with cast_as_called():
        return torch.linalg.pinv(matrix, atol=atol, rtol=rtol, hermitian=hermitian)


@lane_rule(aten.linalg_lstsq.default)
def lstsq(level, a, b, rcond=None, *, driver=None):
    """a [B, *batch, m, n], b [B, *batch, m, k] or [B, *batch, m] -> solution, residuals, rank, singular values"""
    vectors = a.dim() - 1 == b.dim()
    matrix, rhs = level.expanded(a), level.expanded(b)
    out = torch.linalg.lstsq(matrix, rhs.unsqueeze(-1) if vectors else rhs, rcond, driver=driver)
    solution, *others = out
    if vectors:
        solution = solution.squeeze(-1)
    # Parts that a driver does not compute come back with no elements and no batch dims, which looks like no lanes.
    batch = a.dim() - 2

    def part(t, is_rank):
        if t.dim() > batch and t.shape[0] == level.size and (level.size or is_rank):
            return t
        # With the history of what came back, if that fits.
        return t.expand(level.size, 0) if t.shape == (0,) else t.new_empty(level.size, 0)

    return solution, *[part(t, k == 1) for k, t in enumerate(others)]


@lane_rule(aten._linalg_check_errors.default, raw=True)
def check_errors(level, info, api_name, *, is_matrix):
    """info [B, *batch]; torch's message calls the lane a batch element"""
    aten._linalg_check_errors.default(info.value.contiguous(), api_name, is_matrix=False)


def _no_errors(args, kwargs):
    """The short way (hot.py) where there is nothing to report."""
    info = args[0]
    if type(info) is not BatchTensor or info.home is not info.level.lanes:
        return NotImplemented
    return None if at_hand(info.value) and not info.value.any() else NotImplemented


route(aten._linalg_check_errors.default, _no_errors)


@lane_rule(aten.linalg_cross.default)
def cross(level, x, y, *, dim=-1):
    """x, y [B, *S] -> [B, *S]"""
    rank = max(x.dim(), y.dim())
    if x.dim() != y.dim():
        raise RuntimeError("linalg.cross: inputs must have the same number of dimensions.")
    return torch.linalg.cross(level.expanded(x), level.expanded(y), dim=dim % rank + 1)


# --- ranks -----------------------------------------------------------------------------------------------------------


def _rank_above(x: Tensor, tolerance: Tensor, hermitian: bool = False, of_largest: Tensor | None = None) -> Tensor:
    """The number of singular values above a tolerance, or above that share of the largest: x [*S, m, n] -> [*S]"""
    values = torch.linalg.eigvalsh(x).abs() if hermitian else torch.linalg.svdvals(x)
    if not values.shape[-1]:
        return torch.zeros(values.shape[:-1], dtype=torch.int64, device=x.device)
    tolerance = tolerance.unsqueeze(-1)
    if of_largest is not None:
        tolerance = torch.maximum(tolerance, of_largest.unsqueeze(-1) * values.amax(-1, keepdim=True))
    return (values > tolerance).sum(-1)


def _matrix_rank(x, *, atol=None, rtol=None, hermitian=False):
    """torch's own writes the count into a tensor like the matrix, which may have no lanes where a tolerance has."""
    real = x.dtype.to_real()
    smallest = torch.full((), torch.finfo(real).eps * max(x.shape[-2:]), dtype=real, device=x.device)
    none = torch.zeros((), dtype=real, device=x.device)
    if rtol is None:
        rtol = smallest if atol is None else torch.where(atol > 0, 0, smallest)
    return _rank_above(x, none if atol is None else atol, hermitian, rtol)


route_factory(aten.linalg_matrix_rank.atol_rtol_tensor, _matrix_rank)
route_factory(aten.linalg_matrix_rank.tol_tensor, _rank_above)
