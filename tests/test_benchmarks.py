"""The benchmarks: every workload's peers agree, and the instruments measure what they say."""

import math

import pytest
import torch

from benchmarks import __main__ as entry
from benchmarks import compare, conv_per_lane, conv_weight_grad, memory
from benchmarks.measure import Part, round_robin
from benchmarks.workload import BATCHED, LOOP, OWN, WORKLOADS


# The peer has no rule for attention on CPU and for LSTMs, and says so.
@pytest.mark.filterwarnings("ignore:There is a performance drop .*_scaled_dot_product_flash_attention_for_cpu")
@pytest.mark.filterwarnings("ignore:There is a performance drop .*mkldnn_rnn_layer")
@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda w: w.name)
def test_the_peers_of_a_workload_agree(workload):
    peers = workload.build()
    assert {BATCHED, LOOP} & set(peers)
    differences, left_out = compare.compare(peers, workload.tolerance)
    assert left_out == {}
    assert set(differences) == set(peers) - {OWN}


def test_a_wrong_peer_is_refused_and_a_failing_one_left_out():
    with pytest.raises(AssertionError, match="loop differs from lanewise by 5.0e-01"):
        compare.compare({OWN: lambda: torch.ones(2), LOOP: lambda: torch.tensor([1.0, 2.0])}, 0.4)
    with pytest.raises(AssertionError, match="returns 2 arrays"):
        compare.compare({OWN: lambda: torch.ones(2), LOOP: lambda: (torch.ones(2), torch.ones(2))}, 1.0)
    peers = {OWN: lambda: torch.ones(2), LOOP: lambda: torch.ones(2, 3) @ torch.ones(2)}
    differences, notes = compare.compare(peers, 1.0)
    assert differences == {} and notes[LOOP].startswith("RuntimeError: ") and list(peers) == [OWN]
    assert compare.difference(torch.ones(2), torch.ones(1, 2)) == math.inf
    assert not compare.difference(torch.tensor([math.nan]), torch.ones(1)) <= 1.0


def test_peak_memory_counts_what_lives_at_once():
    size = 1 << 20
    assert size <= memory.peak_bytes(lambda: torch.empty(size, dtype=torch.uint8)) < 1.01 * size

    def one_after_the_other():
        for _ in range(3):
            torch.empty(size, dtype=torch.uint8)

    def together():
        return [torch.empty(size, dtype=torch.uint8) for _ in range(3)]

    assert memory.peak_bytes(one_after_the_other) < 1.01 * size
    assert 3 * size <= memory.peak_bytes(together) < 3.01 * size


def test_every_call_is_timed_in_every_round():
    counts = {"a": 0, "b": 0}

    def count(name):
        counts[name] += 1

    timings = round_robin({name: lambda name=name: count(name) for name in counts}, rounds=5, block=1e-5)
    assert {name: len(t.rounds) for name, t in timings.items()} == {"a": 5, "b": 5}
    assert min(counts.values()) > 5


def test_a_part_of_the_work_is_compared_with_the_first_rows_and_multiplied_up():
    def peers(first):
        return {OWN: lambda: torch.arange(8.0), LOOP: Part(lambda: first, 0.25)}

    assert compare.compare(peers(torch.tensor([0.0, 1.0])), 0.0) == ({LOOP: 0.0}, {})
    with pytest.raises(AssertionError, match="loop differs"):
        compare.compare(peers(torch.tensor([0.0, 2.0])), 0.1)

    seconds = 0.0

    def work():
        nonlocal seconds
        seconds += 1.0

    timings = round_robin(
        {LOOP: Part(work, 0.25), OWN: work}, rounds=5, clocks=dict.fromkeys([LOOP, OWN], lambda: seconds)
    )
    assert timings[LOOP].rounds == 3 * [4.0]  # a call of one second sits out after three rounds
    assert timings[OWN].rounds == 3 * [1.0]


@pytest.mark.parametrize("shape", conv_weight_grad.SHAPES[:2] + conv_weight_grad.SHAPES[-1:], ids=str)
def test_the_forms_of_the_convolution_weight_gradient_agree(shape):
    x, g = shape.tensors()
    expected = conv_weight_grad.loop(x.double(), g.double(), shape)
    for name, form in conv_weight_grad.FORMS.items():
        torch.testing.assert_close(form(x, g, shape).double(), expected, rtol=1e-4, atol=1e-3, msg=name)
    assert conv_weight_grad.rule(shape) in conv_weight_grad.FORMS


@pytest.mark.parametrize("shape", conv_per_lane.SHAPES[1:6:2] + conv_per_lane.SHAPES[-3:-2], ids=str)
def test_the_forms_of_a_convolution_with_weights_for_each_lane_agree(shape):
    x, w = conv_per_lane.operands(shape)
    expected = conv_per_lane.loop(x.double(), w.double(), shape)
    for name, form in conv_per_lane.FORMS.items():
        torch.testing.assert_close(form(x, w, shape).double(), expected, rtol=1e-4, atol=1e-3, msg=name)
    assert conv_per_lane.rule(shape) in conv_per_lane.FORMS


def test_the_entry_writes_json_and_markdown(tmp_path, capsys):
    files = ["--json", str(tmp_path / "b.json"), "--markdown", str(tmp_path / "b.md")]
    assert entry.main(["--only", "vmap_dot", "--quick", *files]) == 0
    assert "vmap_dot" in capsys.readouterr().out
    assert '"name": "vmap_dot"' in (tmp_path / "b.json").read_text()
    assert "vmap(dot) over two [64, 5]" in (tmp_path / "b.md").read_text()
    assert entry.main(["--only", "nothing"]) == 2
    assert "vmap_dot" in capsys.readouterr().err
