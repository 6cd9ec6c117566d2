"""The report of `python -m lanewise.coverage`, and the bounds that it is to keep."""

from lanewise._gaps import KNOWN_GAPS
from lanewise.coverage import census, lane_loops, main, rule_class

# The most operations that may run once per lane; the docs list them.
MOST_LANE_LOOPS = 15


def test_few_operations_run_once_per_lane():
    assert len(lane_loops()) <= MOST_LANE_LOOPS


def test_the_census_is_of_this_torch():
    assert len(census()) > 700


def test_every_operation_has_a_class():
    assert [str(op) for op in census() if not rule_class(op)] == []


def test_report(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    assert f"{len(lane_loops())} run once per lane whatever their arguments, with a warning:" in text
    assert all(name in text for name in KNOWN_GAPS)


def test_one_operation(capsys):
    assert main(["aten.sum.dim_IntList"]) == 0
    assert "along dims" in capsys.readouterr().out


def test_an_operation_that_there_is_not(capsys):
    assert main(["torch.cumsun"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("no operation whose name contains 'torch.cumsun'; there are cumsum")
    assert main(["no such operation", "aten.sum.dim_IntList"]) == 0
    assert capsys.readouterr().err == "no operation whose name contains 'no such operation'; --all shows all\n"
