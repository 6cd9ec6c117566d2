"""The case table checks values; test_no_lane_loop.py alone says which cases may take the slow path."""

import pytest

# Cases that a composition does not do yet, with the reason: strict expected failures.
_COPIED = "a copy of an unmapped tensor that is tracked outside does not take lane values"
_INDEX = "torch asks an index of no dims for its number before an unmapped tensor is asked"
_SMOOTHED = "label smoothing masks the loss of an unmapped input in place"
GAPS = {
    ("test_vmap.py", "test_values", "cross_entropy_one"): _SMOOTHED,
    ("test_vmap_vmap.py", "test_values_and_backward", "pixel_shuffle"): "layout of lanes that lie apart",
    ("test_vmap_jvp.py", "test_vmap_jvp", "lstsq_lu"): "residuals of no lanes",
} | {
    (file, test, case): reason
    for file, test in (
        ("test_vmap.py", "test_backward_outside"),
        ("test_vmap_vmap.py", "test_values_and_backward"),
        ("test_grad_vmap.py", "test_grad_vmap"),
        ("test_jvp_vmap.py", "test_jvp_vmap"),
        ("test_vmap_jvp.py", "test_vmap_jvp"),
    )
    for case, reason in (
        ("index_assign", _COPIED),
        ("add_to_row", _COPIED),
        ("cross_entropy_one", _SMOOTHED),
        ("index_zero_dim", _INDEX),
    )
    if case != "index_zero_dim" or "jvp" not in file and file != "test_vmap_vmap.py"
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
