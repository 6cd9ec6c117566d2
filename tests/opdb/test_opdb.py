"""A seeded share of op_db (all of it with LANEWISE_FULL=1) through compositions: right, or still a known gap.

The ops of a group run in a child process, so a crash is one failed op and not the end of the test run.
"""

from __future__ import annotations

import os

import pytest

from .check import MAIN
from .known_gaps import KNOWN_GAPS
from .samples import OPS
from .sweep import GOOD, chosen, line, sweep, verdict

FULL = os.environ.get("LANEWISE_FULL") == "1"
FRACTION, CAP, GROUPS = (1.0, 6, 40) if FULL else (0.15, 3, 4)
SHARES = dict.fromkeys(MAIN, FRACTION) | dict.fromkeys(
    ("vmap_vmap", "vmap_inplace", "backward_vmap", "jvp", "vmap_jvp", "jvp_vmap"), FRACTION if FULL else 0.04
)


@pytest.mark.parametrize("group", range(GROUPS))
@pytest.mark.parametrize("composition", SHARES)
def test_group(composition: str, group: int):
    names = chosen([], SHARES[composition], seed=2)[group::GROUPS]
    outcomes = list(sweep([(name, composition) for name in names], cap=CAP, timeout=600 if FULL else 120))
    assert [o["name"] for o in outcomes] == names
    bad = [line(o) for o in outcomes if verdict(o) not in GOOD]
    assert not bad, "\n" + "\n".join(bad)


def test_known_gaps_are_ops_of_the_table():
    assert not set(KNOWN_GAPS) - set(OPS)
    for reasons in KNOWN_GAPS.values():
        assert set(reasons) <= {*SHARES, "any"}
        assert all(reasons.values())
