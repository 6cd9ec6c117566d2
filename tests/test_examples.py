"""The examples: their numbers at a small size against plain loops and known values, and their entries."""

import importlib
import math
from pathlib import Path

import pytest
import torch

from examples import adaptive_ode, mandelbrot, ragged_sums, root_finder, sphere_tracing

ROOT = Path(__file__).parents[1]
NAMES = ["mandelbrot", "sphere_tracing", "adaptive_ode", "root_finder", "ragged_sums"]


def test_the_mandelbrot_set_has_the_steps_of_plain_python():
    steps = mandelbrot.render(24)
    assert steps.shape == (16, 24) and steps.dtype == torch.int64

    def plain(c):
        z, count = c, 0
        while count < mandelbrot.LIMIT and abs(z) <= 2:
            z, count = z * z + c, count + 1
        return count

    xs, ys = torch.linspace(-2.2, 0.8, 24, dtype=torch.float64), torch.linspace(-1, 1, 16, dtype=torch.float64)
    assert steps.tolist() == [[plain(complex(x, y)) for x in xs.tolist()] for y in ys.tolist()]


def test_the_renderer_shades_what_each_ray_hits():
    image = sphere_tracing.render(12)
    xs, ys = torch.linspace(-1, 1, 12), torch.linspace(0.67, -0.67, 8)
    loop = torch.stack([torch.stack([sphere_tracing.pixel(x, y) for x in xs]) for y in ys])
    torch.testing.assert_close(image, loop, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(image[0], sphere_tracing.SKY.expand(12, 3))
    assert (image[-1] != sphere_tracing.SKY).all()


def test_a_ray_hits_the_ball_where_geometry_says():
    """The ray to the middle of the ball meets it head on: its normal is the way back."""
    centre = torch.tensor([-0.9, 0.6, 0.3])
    back = (sphere_tracing.EYE - centre) / (sphere_tracing.EYE - centre).norm()
    point = centre + 0.6 * back
    torch.testing.assert_close(sphere_tracing.grad(sphere_tracing.distance)(point), back)
    to_light = sphere_tracing.LIGHT - point
    strength = 0.25 + 0.75 * torch.dot(back, to_light / to_light.norm())
    torch.testing.assert_close(sphere_tracing.shade(point), torch.tensor([0.9, 0.3, 0.25]) * strength)


def test_the_solver_takes_the_steps_of_a_loop_and_ends_where_it_should():
    out = adaptive_ode.run(6)
    for i, mu in enumerate(out["mu"]):
        y, accepted, rejected = adaptive_ode.solve(mu)
        torch.testing.assert_close(out["y"][i], y, rtol=1e-9, atol=1e-9)
        assert (int(out["accepted"][i]), int(out["rejected"][i])) == (accepted, rejected)
    assert out["accepted"].unique().numel() > 3
    fine = out["mu"][:3].clone()
    y = torch.tensor([2.0, 0.0], dtype=torch.float64).expand(3, 2)
    h = adaptive_ode.END / 2_000
    for _ in range(2_000):  # the classical method of order four
        f = lambda y: torch.stack([y[:, 1], fine * (1 - y[:, 0] ** 2) * y[:, 1] - y[:, 0]], 1)
        a = f(y)
        b = f(y + h / 2 * a)
        c = f(y + h / 2 * b)
        y = y + h / 6 * (a + 2 * b + 2 * c + f(y + h * c))
    torch.testing.assert_close(out["y"][:3], y, rtol=1e-4, atol=1e-4)


def test_gradients_through_the_steps_are_differences():
    out = adaptive_ode.run(5)
    for mu, slope in zip(out["mu"], out["grad"]):
        shift = 1e-6
        difference = (adaptive_ode.position(mu + shift) - adaptive_ode.position(mu - shift)) / (2 * shift)
        torch.testing.assert_close(slope, difference, rtol=1e-5, atol=1e-6)


def test_roots_and_their_gradients():
    out = root_finder.run(12)
    e, m, x = out["e"], out["m"], out["x"]
    assert (x - e * x.sin() - m).abs().max() < 1e-12
    assert int(out["newton"].max()) > int(out["newton"].min()) and int(out["halved"].max()) > 0
    by_e, by_m = root_finder.implicit(e, x)
    torch.testing.assert_close(out["by_e"], by_e, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(out["by_m"], by_m, rtol=1e-9, atol=1e-9)
    for i in (3, 77, 143):
        plain = root_finder.solve(e.flatten()[i], m.flatten()[i])
        torch.testing.assert_close(x.flatten()[i], plain[0])
        assert (int(out["newton"].flatten()[i]), int(out["halved"].flatten()[i])) == plain[1:]


def test_ragged_rows_are_summed_as_far_as_they_go():
    out = ragged_sums.run(ragged_sums.SENTENCES)
    assert out["lengths"].tolist() == [len(sentence.split()) for sentence in ragged_sums.SENTENCES]
    for row, n in enumerate(out["lengths"].tolist()):
        words = out["x"][row, :n].tolist()
        assert math.isclose(out["mean"][row], sum(words) / n, rel_tol=1e-5)
        assert math.isclose(out["positive"][row], sum(w for w in words if w > 0), rel_tol=1e-5, abs_tol=1e-6)
        assert math.isclose(out["fading"][row], sum(w * 0.5 ** (n - 1 - i) for i, w in enumerate(words)), rel_tol=1e-4)
        best = length = 1
        for before, after in zip(words, words[1:]):
            length = length + 1 if after > before else 1
            best = max(best, length)
        assert int(out["longest_rise"][row]) == best
        slopes = [0.5 ** (n - 1 - i) for i in range(n)] + [0.0] * (out["x"].shape[1] - n)
        torch.testing.assert_close(out["grad"][row], torch.tensor(slopes))


@pytest.mark.parametrize("name", NAMES)
def test_an_example_writes_its_figure(name, tmp_path, capsys):
    path = tmp_path / "figure.png"
    importlib.import_module(f"examples.{name}").main(["--size", "8", "--output", str(path)])
    assert path.read_bytes().startswith(b"\x89PNG")
    assert str(path) in capsys.readouterr().out


def test_every_example_is_tested_and_shown():
    assert sorted(path.stem for path in (ROOT / "examples").glob("[!_]*.py")) == sorted(NAMES)
    page = (ROOT / "docs" / "examples.md").read_text()
    for name in NAMES:
        assert f"examples/{name}.py" in page and f"figures/{name}.png" in page
        assert 0 < (ROOT / "docs" / "figures" / f"{name}.png").stat().st_size < 150_000
