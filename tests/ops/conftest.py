"""The case table checks values; test_no_lane_loop.py alone says which cases may take the slow path."""

import pytest


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/ops/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning"))
