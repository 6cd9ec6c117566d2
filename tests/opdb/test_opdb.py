"""A seeded share of op_db (all of it with LANEWISE_FULL=1) through compositions: right, or still a known gap.

The ops of a group run in a child process, so a crash is one failed op and not the end of the test run.
"""

from __future__ import annotations

import os

import pytest
import torch

from lanewise._gaps import KNOWN_GAPS

from .check import COMPOSITIONS, MAIN
from .samples import OPS
from .sweep import GOOD, chosen, line, sweep, verdict

FULL = os.environ.get("LANEWISE_FULL") == "1"
CAP, GROUPS = (6, 60) if FULL else (3, 6)
SHARES = {composition: 1.0 if FULL else 0.15 if composition in MAIN else 0.04 for composition in COMPOSITIONS}
TASKS = sorted((name, composition) for composition, share in SHARES.items() for name in chosen([], share, seed=2))


@pytest.mark.parametrize("group", range(GROUPS))
def test_group(group: int):
    tasks = TASKS[group::GROUPS]
    outcomes = list(sweep(tasks, cap=CAP, timeout=600 if FULL else 120))
    assert [(o["name"], o["composition"]) for o in outcomes] == tasks
    bad = [line(o) for o in outcomes if verdict(o) not in GOOD]
    assert not bad, "\n" + "\n".join(bad)


def test_known_gaps_are_ops_of_the_table():
    missing = set(KNOWN_GAPS) - set(OPS)
    if torch.__version__ < (2, 13):
        missing = {name for name in missing if "linear_cross_entropy" not in name}  # new in torch 2.13
    assert not missing
    for reasons in KNOWN_GAPS.values():
        assert set(reasons) <= {*SHARES, "any"}
        assert all(reasons.values())
