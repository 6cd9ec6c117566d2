"""The case table checks values; test_no_lane_loop.py alone says which cases may take the slow path."""

import pytest

# Cases that a composition does not do yet, with the reason: strict expected failures.
GAPS = {
    ("test_vmap_vmap.py", "test_values_and_backward", "pixel_shuffle"): "layout of lanes that lie apart",
    ("test_vmap_jvp.py", "test_vmap_jvp", "lstsq_lu"): "residuals of no lanes",
}


def pytest_collection_modifyitems(items):
    for item in items:
        if "tests/ops/" not in item.path.as_posix():
            continue
        item.add_marker(pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning"))
        # torch says this of every variance of nothing, and no lanes are nothing.
        item.add_marker(pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0"))
        item.add_marker(pytest.mark.filterwarnings("ignore:torch.searchsorted.*non-contiguous"))
        case = getattr(item, "callspec", None) and item.callspec.params.get("case")
        reason = GAPS.get((item.path.name, item.originalname, str(case)))
        if reason is not None:
            item.add_marker(pytest.mark.xfail(reason=reason, strict=True))
