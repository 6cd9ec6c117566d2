"""Ops of op_db that do not go through a composition yet, or cannot, with the reason.

An entry is a strict expected failure: it must raise an error (never give a wrong value), and one that passes fails the
test. Keys are op names; the inner keys are compositions, `any` for all of them.
"""

from __future__ import annotations

# Refusals that the law itself asks for, where some layouts of an op have no answer: key phrase -> why.
REFUSALS = {
    "does not currently support same randomness": (
        "with randomness='same', one draw cannot be that of lanes with their own probabilities"
    ),
    "reads memory that is not its own": "as_strided may reach beyond the lane, into its neighbours",
    "sparse tensors cannot have lanes": "the lanes of a tensor share one layout",
}
_APART = "a view that torch refuses of the slices, too; the sweep's loop has contiguous lanes"
KNOWN_GAPS: dict[str, dict[str, str]] = {
    "nn.functional.linear_cross_entropy.chunked": dict.fromkeys(
        ("vmap", "vmap_grad", "grad_vmap", "backward_vmap", "jvp_vmap"), "its chunks of no lanes are none to stack"
    ),
    "nn.functional.linear_cross_entropy.chunked_none": dict.fromkeys(
        ("vmap", "vmap_grad", "grad_vmap", "backward_vmap", "jvp_vmap"), "it writes lanes into buffers made in backward"
    ),
    "take_along_dim": {"vmap_vmap": _APART},
    "to_sparse": {"any": "sparse tensors have no lanes"},
    "torch._scaled_mm": dict.fromkeys(
        ("vmap", "vmap_vmap"), "torch adds no float8, as rounding them up to lanes would"
    ),
    "torch._scaled_mm_v2": {"vmap_vmap": "scales with lanes in the last dim"},
    "view_as": {"vmap_vmap": _APART},
    "view_as_complex": {"vmap_vmap": _APART},
}


def gap_reason(name: str, composition: str) -> str | None:
    """Why the op is not expected to go through the composition, None if it is."""
    reasons = KNOWN_GAPS.get(name, {})
    return reasons.get(composition, reasons.get("any"))
