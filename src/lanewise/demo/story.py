"""The demo from beginning to end: train, find the wrong labels, compare, and look at the derivatives."""

import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lanewise import grad_and_value, vmap
from lanewise.demo import data, derivatives, ensemble, figure, model, peers, ranking, training
from lanewise.demo.report import explain, percent, section, table, title

SEED = 0


@dataclass(frozen=True)
class Size:
    """How much work the demo does."""

    epochs: int
    members_epochs: int
    timed_examples: int
    timed_rounds: int


FULL = Size(epochs=30, members_epochs=10, timed_examples=1500, timed_rounds=5)
QUICK = Size(epochs=3, members_epochs=1, timed_examples=64, timed_rounds=2)


@dataclass(frozen=True)
class Trained:
    """A network, its parameters after training, and what gradients and losses say of each training example."""

    net: nn.Module
    params: model.Params
    predicted: Tensor
    norm: Tensor
    share: Tensor
    loss: Tensor


def run(output: Path, *, quick: bool = False) -> None:
    """Run the demo, print what it finds, and save the figure in the folder `output`."""
    started = time.perf_counter()
    size = QUICK if quick else FULL
    title("Lanewise: finding wrong labels with the gradient of every single example")
    digits = data.load(SEED)
    _data(digits)
    trained = _training(digits, size)
    _finding(digits, trained)
    group = trained["GroupNorm"]
    path = output / "suspects.png"
    figure.save(path, digits, group.predicted, group.norm, group.share)
    print(f"\n  figure of the first suspects: {path}")
    _comparison(digits, group, size)
    _ensemble(digits, size)
    _derivatives(digits, group)
    print(f"\nDone in {time.perf_counter() - started:.0f} s. All numbers but the times are the same on each run.")


def _data(digits: data.Digits) -> None:
    section("Data")
    explain("scikit-learn's handwritten digits, 8 x 8 pixels, ten classes; they come with the package.")
    table(
        ("", "images"),
        [
            ("for training", f"{len(digits.images):,}"),
            ("  of these with a label flipped on purpose", f"{int(digits.flipped.sum()):,}", "the ones to be found"),
            ("for testing, labels untouched", f"{len(digits.test_images):,}"),
        ],
    )


def _training(digits: data.Digits, size: Size) -> dict[str, Trained]:
    section("1. Training with clipped per-sample gradients")
    explain(
        """vmap(grad(loss)) gives one gradient per example. Each is cut to length 1 before they are averaged, so a wrong
        label pulls no harder than a right one and is not learnt by heart. BatchNorm ties examples together; after
        replace_all_batch_norm_modules_ each example is normalised by itself. The last column leaves the cut out; its
        step size is the best of 0.02, 0.05 and 0.1."""
    )
    trained = {
        "GroupNorm": _train_one(digits, model.group_norm_net(SEED), size, 1.0, 0.5, "GroupNorm"),
        "BatchNorm": _train_one(digits, model.batch_norm_net(SEED), size, 1.0, 0.5, "BatchNorm"),
        "not cut": _train_one(digits, model.group_norm_net(SEED), size, float("inf"), 0.02, "not cut"),
    }
    true, given, flipped = digits.true, digits.given, digits.flipped
    tests = [
        model.accuracy(model.predict(t.net, t.params, digits.test_images), digits.test_labels) for t in trained.values()
    ]
    fitted = [model.accuracy(t.predicted, true) for t in trained.values()]
    learnt = [model.accuracy(t.predicted[flipped], given[flipped]) for t in trained.values()]
    table(
        (f"after {size.epochs} epochs", *trained),
        [
            ("accuracy on the test images", *map(percent, tests)),
            ("accuracy on the training images, true labels", *map(percent, fitted)),
            ("flipped labels learnt by heart", *map(percent, learnt), "the network repeats the wrong label"),
        ],
    )
    return trained


def _train_one(digits: data.Digits, net: nn.Module, size: Size, bound: float, rate: float, name: str) -> Trained:
    params = training.train(
        net, digits.images, digits.given, epochs=size.epochs, bound=bound, rate=rate, seed=SEED, title=name
    )
    each = vmap(grad_and_value(model.loss_of(net)), in_dims=(None, 0, 0))
    gradients, losses = each(params, digits.images, digits.given)
    return Trained(
        net,
        params,
        model.predict(net, params, digits.images),
        ranking.gradient_norm(gradients),
        ranking.share_of_mean(gradients),
        losses.detach(),
    )


def _finding(digits: data.Digits, trained: dict[str, Trained]) -> None:
    section("2. Which labels are wrong?")
    flipped, group = digits.flipped, trained["GroupNorm"]
    count, total = int(flipped.sum()), len(flipped)
    explain(
        f"""One call gives the gradients of all {total:,} training examples at the trained parameters. An example that
        the network has understood is silent by now; a wrong label still pulls. Two rankings: by the norm of the
        gradient, and by its agreement with the mean gradient (the share of the mean that the example supplies). To
        compare with, the ranking that needs no gradients: by the example's loss."""
    )
    rankings = {
        "norm": group.norm,
        "agreement": group.share,
        "loss": group.loss,
        "BatchNorm: norm": trained["BatchNorm"].norm,
        "not cut: norm": trained["not cut"].norm,
    }
    precision, recall = [], []
    for looked_at in (count // 3, 2 * count // 3, count, 4 * count // 3, 2 * count):
        found = [ranking.find(score, flipped, looked_at) for score in rankings.values()]
        name = f"first {looked_at} looked at"
        precision.append((name, *(percent(f.precision) for f in found), percent(count / total)))
        recall.append((name, *(percent(f.recall) for f in found), percent(looked_at / total)))
    table(("Precision: looked at and flipped", *rankings, "chance"), precision)
    table((f"Recall: found of the {count} flipped", *rankings, "chance"), recall)
    supplied = group.share[flipped].sum().item()
    print()
    explain(
        f"""The flipped labels are {percent(count / total)} of the examples and supply {percent(supplied)} of the mean
        gradient (above 100 % the others pull the other way). The median norm of a flipped example's gradient is
        {group.norm[flipped].median():.1f}, that of the others {group.norm[~flipped].median():.1g}. The loss alone,
        which needs no gradients, finds {percent(ranking.find(group.loss, flipped, count).recall)} of the flipped labels
        among its first {count}, the norm {percent(ranking.find(group.norm, flipped, count).recall)}: what each example
        does to the parameters, only its gradient tells."""
    )


def _comparison(digits: data.Digits, trained: Trained, size: Size) -> None:
    n = size.timed_examples
    section("3. One call against the loop")
    explain(
        f"""The gradients of {n:,} examples with respect to all parameters, computed in three ways on one thread; median
        CPU time, which other programs do not disturb. The difference is the largest one between any entry and
        Lanewise's."""
    )
    timings = peers.compare(trained.net, trained.params, digits.images[:n], digits.given[:n], size.timed_rounds)
    own = next(iter(timings.values())).seconds
    table(
        ("", "time", "of Lanewise's", "difference"),
        [
            (
                name,
                f"{1e3 * t.seconds:,.0f} ms",
                f"{t.seconds / own:.2f} x",
                f"{t.difference:.0e}" if t.difference else "-",
            )
            for name, t in timings.items()
        ],
    )


def _ensemble(digits: data.Digits, size: Size) -> None:
    section("4. Eight networks at once, and how sure they are")
    explain(
        """stack_module_state puts eight networks side by side and vmap trains them together, each from its own start.
        Entropy is their whole uncertainty (at most ln 10 = 2.30 nats); disagreement is the part that comes from
        the members contradicting each other. Both should rise as the images get worse. (Turned upside down, a 6 is a
        sound 9: there the networks may be sure and wrong.)"""
    )
    nets = [model.group_norm_net(seed) for seed in range(100, 108)]
    params = ensemble.train_ensemble(nets, digits.images, digits.given, epochs=size.members_epochs, seed=SEED)
    generator = torch.Generator().manual_seed(SEED)
    noise = torch.randn(digits.test_images.shape, generator=generator)
    images = {
        "test images": digits.test_images,
        "with noise of 0.2": digits.test_images + 0.2 * noise,
        "with noise of 0.5": digits.test_images + 0.5 * noise,
        "turned upside down": digits.test_images.flip(-2, -1),
        "pure noise": noise.abs().clamp(max=1),
    }
    rows = []
    for name, shown in images.items():
        prediction = ensemble.predict_ensemble(nets[0], params, shown)
        right = model.accuracy(prediction.probabilities.argmax(dim=1), digits.test_labels)
        rows.append(
            (
                name,
                "-" if name == "pure noise" else percent(right),
                f"{prediction.entropy.mean():.2f}",
                f"{prediction.disagreement.mean():.2f}",
            )
        )
    table(("", "accuracy", "entropy", "disagreement"), rows)
    prediction = ensemble.predict_ensemble(nets[0], params, digits.test_images)
    correct = prediction.probabilities.argmax(dim=1) == digits.test_labels
    order = prediction.entropy.argsort(stable=True)
    half = len(order) // 2
    print()
    explain(
        f"""Test images: the half that the ensemble is surer of holds {int((~correct[order[:half]]).sum())} mistakes,
        the other half {int((~correct[order[half:]]).sum())}."""
    )


def _derivatives(digits: data.Digits, trained: Trained) -> None:
    section("5. A Jacobian and a Hessian")
    with torch.no_grad():
        logits = vmap(model.logits_of(trained.net), in_dims=(None, 0))(trained.params, digits.test_images)
    doubt = ensemble.entropy(logits.softmax(dim=1))
    chosen = int(doubt.argmax())
    image, label = digits.test_images[chosen], digits.test_labels[chosen]
    explain(
        """The trained network at the test image that it is least sure of, in float64, with respect to the 64 pixels.
        The deviation is the largest one from central differences of plain outputs, in which no transform has a part."""
    )
    reverse, forward = derivatives.check_jacobian(trained.net, trained.params, image)
    second = derivatives.check_hessian(trained.net, trained.params, image, label)
    bend = torch.linalg.eigvalsh(second.derivative).abs()
    table(
        ("", "shape", "largest entry", "deviation"),
        [
            _derivative_row("jacrev of the logits", reverse),
            _derivative_row("jacfwd of the logits", forward),
            _derivative_row("hessian of the loss", second),
        ],
    )
    pixel = int(reverse.derivative[int(label)].abs().argmax())
    print()
    explain(
        f"""The image shows a {int(label)}, the network says {int(logits[chosen].argmax())}. The logit of {int(label)}
        depends most on the pixel in row {pixel // 8}, column {pixel % 8}. The loss bends in few directions: of the 64
        eigenvalues of the Hessian {int((bend > 0.1 * bend.max()).sum())} exceed a tenth of the largest,
        {bend.max():.1f}."""
    )


def _derivative_row(name: str, check: derivatives.Check) -> tuple[str, ...]:
    shape = " x ".join(map(str, check.derivative.shape))
    return name, shape, f"{check.derivative.abs().max():.1f}", f"{check.deviation:.0e}"
