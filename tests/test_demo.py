"""The demo: its parts against a loop over examples and by hand, its entry, and that it finds the flipped labels."""

import importlib.util
import math
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from lanewise import grad, vmap
from lanewise.demo import __main__ as entry
from lanewise.demo import data, derivatives, ensemble, model, peers, ranking, training
from tests.gradients_below import forget


def test_flip_labels_changes_exactly_as_many_as_asked():
    labels = torch.arange(1000) % 10
    changed, flipped = data.flip_labels(labels, 50, torch.Generator().manual_seed(3))
    assert int(flipped.sum()) == 50
    assert torch.equal(flipped, changed != labels)
    assert int(changed.min()) >= 0 and int(changed.max()) <= 9
    again, _ = data.flip_labels(labels, 50, torch.Generator().manual_seed(3))
    assert torch.equal(changed, again)


def test_digits_are_split_without_loss_and_only_training_labels_are_flipped():
    digits = data.load(0)
    assert len(digits.images) + len(digits.test_images) == 1797
    assert int(digits.flipped.sum()) == 75
    assert torch.equal(digits.given[~digits.flipped], digits.true[~digits.flipped])
    assert float(digits.images.min()) == 0 and float(digits.images.max()) == 1


@pytest.mark.parametrize("make", [model.group_norm_net, model.batch_norm_net])
def test_per_sample_gradients_are_those_of_the_loop(make):
    digits, net = data.load(0), make(1)
    params = model.parameters_of(net)
    images, labels = digits.images[:6], digits.given[:6]
    one_call = peers.lanewise_gradients(net)(params, images, labels)
    loop = peers.loop_gradients(net)(params, images, labels)
    torch.testing.assert_close(one_call, loop, rtol=1e-4, atol=1e-5)
    assert peers.largest_difference(one_call, loop) < 1e-4


def test_clipped_mean_cuts_each_example_by_itself():
    gradients = {"a": torch.tensor([[3.0, 0.0], [0.3, 0.0], [0.0, 0.0]]), "b": torch.tensor([[4.0], [0.4], [0.0]])}
    assert training.norms(gradients).tolist() == pytest.approx([5.0, 0.5, 0.0])
    mean = training.clipped_mean(gradients, 1.0)
    assert mean["a"].tolist() == pytest.approx([(0.6 + 0.3) / 3, 0.0])
    assert mean["b"].tolist() == pytest.approx([(0.8 + 0.4) / 3])
    whole = training.clipped_mean(gradients, math.inf)
    assert whole["b"].tolist() == pytest.approx([4.4 / 3])


def test_shares_of_the_mean_add_up_and_tell_agreement():
    gradients = {"a": torch.tensor([[2.0, 0.0], [1.0, 1.0], [-1.0, 0.0]])}
    shares = ranking.share_of_mean(gradients)
    mean = torch.tensor([2 / 3, 1 / 3])
    expected = [float(row @ mean / (3 * mean @ mean)) for row in gradients["a"]]
    assert shares.tolist() == pytest.approx(expected)
    assert float(shares.sum()) == pytest.approx(1.0)
    assert shares[2] < 0


def test_finding_counts_hits_among_the_highest():
    flipped = torch.tensor([True, False, True, False])
    finding = ranking.find(torch.tensor([0.9, 0.8, 0.1, 0.2]), flipped, 2)
    assert (finding.found, finding.precision, finding.recall) == (1, 0.5, 0.5)


def test_differences_of_known_functions():
    x = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
    jacobian = derivatives.jacobian_by_differences(lambda rows: rows.sin() * rows.sum(dim=1, keepdim=True), x)
    expected = torch.diag(x.cos() * x.sum()) + x.sin()[:, None].expand(3, 3)
    torch.testing.assert_close(jacobian, expected, rtol=0, atol=1e-9)
    second = derivatives.hessian_by_differences(lambda rows: rows.prod(dim=1), x)
    expected = torch.tensor([[0, x[2], x[1]], [x[2], 0, x[0]], [x[1], x[0], 0]], dtype=torch.float64)
    torch.testing.assert_close(second, expected, rtol=0, atol=1e-8)


def test_jacobian_and_hessian_agree_with_differences():
    net, image = model.group_norm_net(2), data.load(0).test_images[3]
    params = model.parameters_of(net)
    reverse, forward = derivatives.check_jacobian(net, params, image)
    assert reverse.derivative.shape == (10, 64)
    assert reverse.deviation < 1e-7 and forward.deviation < 1e-7
    second = derivatives.check_hessian(net, params, image, torch.tensor(4))
    assert second.derivative.shape == (64, 64)
    assert second.deviation < 1e-5
    assert second.derivative.abs().max() > 1e-3


def test_the_ensemble_trains_each_member_as_if_it_were_alone():
    digits = data.load(0)
    images, labels = digits.images[:40], digits.given[:40]
    nets = [model.group_norm_net(seed) for seed in (5, 6)]
    together = ensemble.train_ensemble(nets, images, labels, epochs=1, seed=0, batch=40)
    for member, net in enumerate(nets):
        leaves = list(net.parameters())
        gradients = torch.autograd.grad(F.cross_entropy(net(images), labels), leaves)
        for (name, p), g in zip(net.named_parameters(), gradients):
            torch.testing.assert_close(together[name][member], (p - 0.1 * g).detach(), rtol=1e-4, atol=1e-5)
    prediction = ensemble.predict_ensemble(nets[0], together, images)
    assert prediction.probabilities.sum(dim=1).tolist() == pytest.approx([1.0] * 40, abs=1e-5)
    assert float(prediction.disagreement.min()) > -1e-6
    assert float((prediction.entropy - prediction.disagreement).min()) > 0


def test_a_short_training_already_finds_most_flipped_labels():
    digits, net = data.load(0), model.group_norm_net(0)
    params = training.train(net, digits.images, digits.given, epochs=6)
    gradients = vmap(grad(model.loss_of(net)), in_dims=(None, 0, 0))(params, digits.images, digits.given)
    for score in (ranking.gradient_norm(gradients), ranking.share_of_mean(gradients)):
        assert ranking.find(score, digits.flipped, 75).precision > 0.8
    predicted = model.predict(net, params, digits.test_images)
    assert model.accuracy(predicted, digits.test_labels) > 0.95


def test_a_missing_package_is_named_with_the_remedy(monkeypatch, capsys):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "sklearn" else real(name))
    assert entry.main([]) == 2
    assert capsys.readouterr().err == (
        "The demo needs scikit-learn, which this Python does not have.\nInstall the extra:  pip install '.[examples]'\n"
    )


def test_help_says_what_the_demo_does(capsys):
    with pytest.raises(SystemExit) as left:
        entry.main(["--help"])
    assert left.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Find wrong labels among handwritten digits with the gradient of every single example" in text
    assert "--quick" in text and "--output" in text


def test_the_demo_prints_the_same_numbers_on_each_run(tmp_path, capsys):
    forget()  # a later call of the same function may differ in the last digit
    threads = torch.get_num_threads()
    assert entry.main(["--quick", "--output", str(tmp_path / "here")]) == 0
    assert torch.get_num_threads() == threads
    here = capsys.readouterr().out
    command = [sys.executable, "-W", "error", "-m", "lanewise.demo", "--quick", "--output", str(tmp_path / "there")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert _without_times(here).replace("/here/", "/there/") == _without_times(run.stdout)
    head = next(line for line in here.splitlines() if "Precision: looked at and flipped" in line)
    assert head.split()[5:8] == ["norm", "agreement", "loss"]
    for folder in ("here", "there"):
        assert (tmp_path / folder / "suspects.png").read_bytes().startswith(b"\x89PNG")


def _without_times(text: str) -> str:
    text = re.sub(r"[\d,]+ ms +[\d.]+ x", "", text)
    return re.sub(r" +", " ", re.sub(r"Done in \d+ s", "", text))
