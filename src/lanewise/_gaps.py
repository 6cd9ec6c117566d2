"""Ops of op_db that do not go through a composition yet, or cannot, with the reason.

An entry is a strict expected failure: it must raise an error (never give a wrong value), and one that passes fails the
test. Keys are op names; the inner keys are compositions, `any` for all of them.
"""

from __future__ import annotations

# Refusals that the law itself asks for, where some layouts of an op have no answer: key phrase -> why.
REFUSALS = {
    "does not currently support same randomness": (
        "with randomness='same', where a transform between two vmaps draws more numbers in some lanes than in others"
    ),
    "reads memory that is not its own": "as_strided may reach beyond the lane, into its neighbours",
    "sparse tensors cannot have lanes": "the lanes of a tensor share one layout",
}
KNOWN_GAPS: dict[str, dict[str, str]] = {
    "to_sparse": {"any": "sparse tensors have no lanes"},
}


def gap_reason(name: str, composition: str) -> str | None:
    """Why the op is not expected to go through the composition, None if it is."""
    reasons = KNOWN_GAPS.get(name, {})
    return reasons.get(composition, reasons.get("any"))
