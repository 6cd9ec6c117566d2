"""The case table checks values; test_no_lane_loop.py alone says which cases may take the slow path."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/ops/" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning"))
        # torch says this of every variance of nothing, and no lanes are nothing.
        item.add_marker(pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0"))
        item.add_marker(pytest.mark.filterwarnings("ignore:torch.searchsorted.*non-contiguous"))
