"""Running statistics and counts of batch and instance norm, captured or with lanes, against a Python loop."""

import copy
import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lanewise import functional_call, grad, jacfwd, jvp, stack_module_state, vmap
from lanewise._transforms.parting import parted
from tests.oracles import assert_same

D = torch.float64
NORMS = {
    "batch 1d": (lambda m: nn.BatchNorm1d(3, momentum=m), (5, 4, 3)),
    "batch 2d": (lambda m: nn.BatchNorm2d(3, momentum=m, affine=False), (5, 4, 3, 2, 2)),
    "instance": (lambda m: nn.InstanceNorm1d(3, momentum=m, affine=True, track_running_stats=True), (5, 2, 3, 4)),
    "instance, unbatched": (lambda m: nn.InstanceNorm1d(3, momentum=m, track_running_stats=True), (5, 3, 4)),
}


def loop(f):
    def mapped(*xs):
        rows = [f(*lane) for lane in zip(*xs, strict=True)]
        if isinstance(rows[0], tuple):
            return tuple(torch.stack(column) for column in zip(*rows, strict=True))
        return torch.stack(rows)

    return mapped


def plain_grad(f):
    def gradient(x):
        x = x.detach().requires_grad_()
        return torch.autograd.grad(f(x), x)[0]

    return gradient


def cubes(f):
    return lambda *xs: f(*xs).pow(3).sum()


def twice(m):
    return lambda x: m(m(x) * 2 + 1) + m(x * 3)


USES = {
    "vmap": lambda m: (vmap(m), loop(m)),
    "chunks": lambda m: (vmap(m, chunk_size=2), loop(m)),
    "in grad": lambda m: (vmap(grad(cubes(m))), loop(plain_grad(cubes(m)))),
    "of grad": lambda m: (grad(cubes(vmap(m))), loop(plain_grad(cubes(m)))),
    "of grad of grad": lambda m: (
        vmap(grad(lambda x: grad(cubes(m))(x).square().sum())),
        loop(grad(lambda x: grad(cubes(m))(x).square().sum())),
    ),
    "around jvp": lambda m: (vmap(lambda x: jvp(m, (x,), (x.sin(),))), loop(lambda x: jvp(m, (x,), (x.sin(),)))),
    "in jvp": lambda m: (lambda x: jvp(vmap(m), (x,), (x.sin(),)), loop(lambda x: jvp(m, (x,), (x.sin(),)))),
}


def check(module, use, x):
    """The same output from a copy under the transform and another in the loop, and the same buffers afterwards."""
    one, other = copy.deepcopy(module), copy.deepcopy(module)
    got, want = use(one)[0](x), use(other)[1](x)
    detach = lambda out: tuple(t.detach() for t in out) if isinstance(out, tuple) else out.detach()
    assert_same(detach(got), detach(want))
    assert_same(tuple(one.buffers()), tuple(other.buffers()))


@pytest.mark.parametrize("momentum", [0.3, None, 1.0, 0.0])
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("name", NORMS)
def test_captured_statistics_are_updated_lane_after_lane(name, use, momentum):
    make, shape = NORMS[name]
    module = make(momentum).to(D)
    module(torch.randn(shape[1:], dtype=D))
    check(module, USES[use], torch.randn(shape, dtype=D))


@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("name", NORMS)
def test_two_deep(name, momentum):
    make, shape = NORMS[name]
    check(make(momentum).to(D), lambda m: (vmap(vmap(m)), loop(loop(m))), torch.randn(2, *shape, dtype=D))


@pytest.mark.parametrize("momentum", [0.3, None])
def test_several_calls_of_one_norm(momentum):
    """Lane 0 makes all its calls before lane 1 makes any, also where the calls are vmaps inside."""
    module, x = nn.BatchNorm1d(3, momentum=momentum).to(D), torch.randn(2, 5, 4, 3, dtype=D)
    check(module, lambda m: (vmap(twice(m)), loop(twice(m))), x[0])
    check(module, lambda m: (vmap(vmap(twice(m))), loop(loop(twice(m)))), x)

    def mixed(m, mapped):
        return lambda x: mapped(m)(x).sum() + mapped(twice(m))(x * 2).sum() + m(x.sum(0)).sum() + mapped(m)(-x).sum()

    check(module, lambda m: (vmap(mixed(m, vmap)), loop(mixed(m, loop))), x)


def test_several_maps_inside_one_transform():
    def steps(m, mapped):
        return lambda x: mapped(m)(x) + mapped(m)(x * 2) + mapped(m)(x * 3)

    module, x = nn.BatchNorm1d(3).to(D), torch.randn(5, 4, 3, dtype=D)
    check(module, lambda m: (lambda x: jvp(steps(m, vmap), (x,), (x,))[0], steps(m, loop)), x)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_lanes_of_the_weights_alone_count(momentum):
    w, x = torch.randn(2, 3, dtype=D), torch.randn(5, 4, 3, dtype=D)

    def each(m, mapped):
        return lambda w: mapped(lambda x: functional_call(m, {"weight": w}, (x,)))(x)

    def one(m):
        return lambda w: functional_call(m, {"weight": w}, (x[0],))

    module = nn.BatchNorm1d(3, momentum=momentum).to(D)
    check(module, lambda m: (vmap(each(m, vmap)), loop(each(m, loop))), w)
    check(module, lambda m: (vmap(one(m)), loop(one(m))), w)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_statistics_of_an_ensemble_inside_which_examples_are_mapped(momentum):
    models = [nn.BatchNorm1d(3, momentum=momentum).to(D) for _ in range(2)]
    params, buffers = stack_module_state(models)
    base, x = copy.deepcopy(models[0]), torch.randn(2, 5, 4, 3, dtype=D)
    got = vmap(lambda p, b, x: vmap(lambda x: functional_call(base, (p, b), (x,)))(x))(params, buffers, x)
    want = torch.stack([loop(model)(lane) for model, lane in zip(models, x, strict=True)])
    assert_same(got.detach(), want.detach())
    _, afterwards = stack_module_state(models)
    assert_same(tuple(buffers.values()), tuple(afterwards.values()))
    assert int(base.num_batches_tracked) == 0


def test_one_statistic_captured_and_one_with_lanes():
    x, mean, var = torch.randn(4, 3, dtype=D), torch.randn(3, 3, dtype=D), torch.rand(3, dtype=D)
    f = lambda var: lambda mean: F.batch_norm(x, mean, var, training=True, momentum=0.2)
    means, variance = mean.clone(), var.clone()
    assert_same(vmap(f(var))(mean), loop(f(variance))(means))
    assert_same((mean, var), (means, variance))


def test_the_directions_of_jacfwd_are_no_batches():
    module, x = nn.BatchNorm1d(3).to(D), torch.randn(4, 3, dtype=D)
    twin = copy.deepcopy(module)
    jacfwd(module)(x)
    twin(x)
    assert_same(tuple(module.buffers()), tuple(twin.buffers()))


def test_no_lanes_update_nothing():
    module = nn.BatchNorm1d(3)
    assert vmap(module)(torch.zeros(0, 4, 3)).shape == (0, 4, 3)
    assert_same((module.running_mean, module.running_var), (torch.zeros(3), torch.ones(3)))


def test_the_same_tensors_can_be_differentiated_afterwards():
    """The statistics that a backward pass saved are not those that it finds."""
    module, x = nn.BatchNorm1d(3).to(D), torch.randn(5, 4, 3, dtype=D)
    first = vmap(module)(x)
    vmap(module)(x * 2)
    first.sum().backward()
    assert_same(module.bias.grad, torch.full((3,), 20.0, dtype=D))


def test_several_calls_of_one_instance_norm():
    module = nn.InstanceNorm1d(3, track_running_stats=True).to(D)
    check(module, lambda m: (vmap(twice(m)), loop(twice(m))), torch.randn(5, 2, 3, 4, dtype=D))


def test_tangents_outside_of_statistics_with_lanes():
    """Statistics made outside of jvp get their new values; those that are its argument get tangents, too."""
    x, t = torch.randn(2, 4, 2, 3, 5, dtype=D)
    stats = torch.rand(2, 4, 3, dtype=D)

    def mapped(x, mean, var):
        return vmap(lambda x, m, v: F.instance_norm(x, m, v))(x, mean, var)

    mean, var = stats.clone()
    assert_same(jvp(lambda x: mapped(x, mean, var), (x,), (t,)), jvp(vmap(F.instance_norm), (x,), (t,)))
    assert_same(mean, stats[0] * 0.9 + x.mean((1, 3)) * 0.1)
    assert_same(var, stats[1] * 0.9 + x.var(3).mean(1) * 0.1)

    def updated(x, mean, var):
        mean = mean * 1
        mapped(x, mean, var)
        return mean

    change = torch.randn(4, 3, dtype=D)
    got = jvp(lambda x, mean: updated(x, mean, stats[1].clone()), (x, stats[0]), (t, change))[1]
    assert_same(got, change * 0.9 + t.mean((1, 3)) * 0.1)


# --- lanes that take different branches -------------------------------------------------------------------------------


def on_one_side(m, mapped):
    return lambda x: m(x) if x.sum() > 0 else -x


def on_both_sides(m, mapped):
    return lambda x: m(x) * 2 if x.sum() > 0 else m(x * 2) - x


def before_and_after(m, mapped):
    def f(x):
        y = m(x)
        if x.sum() > 0:
            y = m(y * x) + y
        return m(y + x)

    return f


def repeated(m, mapped):
    def f(x):
        steps = 0
        while x.abs().sum() > 9 and steps < 4:
            x = m(x * 0.6) * 0.5 + x * 0.3
            steps = steps + 1
        return x

    return f


def returned_early(m, mapped):
    def f(x):
        if x.sum() > 1:
            return m(x)
        y = m(x * 3)
        if y.flatten()[0] > 0:
            return m(y) * y
        return y

    return f


def in_a_generator(m, mapped):
    def grown(x):
        while x.sum() < 9:
            x = m(x) + x * 1.1 + 0.4
            yield x

    def f(x):
        total = x * 0
        for y in grown(x.abs()):
            total = total + y.sin()
        return m(total * x) if total.sum() > 0 else total * x

    return f


def in_maps_inside(m, mapped):
    def f(x):
        y = m(x[0])
        y = y + mapped(lambda z: m(z) + z if z.sum() > 0 else m(m(z)))(x).sum(0)
        if y.sum() > 0.3:
            y = y + mapped(lambda z: m(z) + z if z.sum() > 0.2 else m(m(z)))(x * 2).sum(0)
        return m(y) + mapped(m)(x).sum(0)

    return f


PARTING = [on_one_side, on_both_sides, before_and_after, repeated, returned_early, in_a_generator, in_maps_inside]
AROUND = {
    "vmap": lambda f, mapped: mapped(f),
    "chunks": lambda f, mapped: vmap(f, chunk_size=2) if mapped is vmap else mapped(f),
    "grad inside": lambda f, mapped: mapped(grad(cubes(f))),
    "grad around": lambda f, mapped: grad(cubes(mapped(f))),
    "jvp inside": lambda f, mapped: mapped(lambda x: jvp(f, (x,), (x.sin(),))[1]),
    "jvp around": lambda f, mapped: lambda x: jvp(mapped(f), (x,), (x.sin(),))[1],
    "two deep": lambda f, mapped: mapped(mapped(f)),
}


@pytest.fixture(params=["converted", "as written"])
def way(request, monkeypatch):
    """Lanes part in converted code, or the function is run again."""
    if request.param == "as written":
        monkeypatch.setattr("lanewise._control.runs.split.converted", lambda func: None)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("f", PARTING)
def test_lanes_that_take_different_branches(f, around, momentum, way):
    """Each lane makes its own updates, in the order of the lanes."""
    deep = (f is in_maps_inside) + (around == "two deep")
    x = torch.randn(*(4, 3)[:deep], 5, 4, 3, dtype=D, generator=torch.Generator().manual_seed(5))
    module = nn.BatchNorm1d(3, momentum=momentum).to(D)
    module(torch.randn(4, 3, dtype=D, generator=torch.Generator().manual_seed(6)))
    run = AROUND[around]
    check(module, lambda m: (run(f(m, vmap), vmap), run(f(m, loop), loop)), x)
    check(module, lambda m: (run(f(m, vmap), vmap), run(f(m, loop), loop)), -x)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("f", [on_both_sides, before_and_after])
def test_other_norms_where_lanes_take_different_branches(f, name, way):
    make, shape = NORMS[name]
    module, x = make(0.3).to(D), torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(7))
    check(module, lambda m: (vmap(f(m, vmap)), loop(f(m, loop))), x)


def by_batch_norm(mean, var):
    return lambda x: F.batch_norm(x, mean, var, training=True, momentum=0.3)


def by_native_batch_norm(mean, var):
    return lambda x: torch.native_batch_norm(x, None, None, mean, var, True, 0.3, 1e-5)[0]


def by_statistics_alone(mean, var):
    return lambda x: torch.batch_norm_update_stats(x, mean, var, 0.3)[0] + x


def by_a_view(mean, var):
    return lambda x: F.batch_norm(x[..., :2], mean[:2], var[:2], training=True).sum() + x


def by_a_vendor(mean, var):
    def norm(x):
        # The kernel itself is not there.
        op = torch.native_batch_norm if type(x) is torch.Tensor else torch.ops.aten.cudnn_batch_norm
        return op(x, torch.ones(3, dtype=D), None, mean, var, True, 0.3, 1e-5)[0]

    return norm


BY = [by_batch_norm, by_native_batch_norm, by_statistics_alone, by_a_view, by_a_vendor]


def with_lanes(f, by, around, mapped):
    """The results of `f`, and statistics [*B, 3] after it has run."""

    def g(x, mean, var):
        def inner(x):
            return f(by(mean, var), mapped)(x)

        return (grad(cubes(inner)) if around == "grad inside" else inner)(x), mean * 1, var * 1

    return mapped(mapped(g)) if around == "two deep" else mapped(g)


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("around", ["vmap", "grad inside", "two deep", "inference"])
@pytest.mark.parametrize(
    ("f", "by"), [*[(f, by_batch_norm) for f in PARTING], *[(before_and_after, by) for by in BY[1:]]]
)
def test_statistics_with_lanes_are_updated_in_the_lanes_that_run(f, by, around, way):
    if around == "grad inside" and by in (by_statistics_alone, by_a_vendor):
        pytest.skip("these have no derivative outside")
    lanes = (2, 5) if around == "two deep" else (5,)
    noise = torch.Generator().manual_seed(8)
    x = torch.randn(*lanes, *(3,) * (f is in_maps_inside), 4, 3, dtype=D, generator=noise)
    start = torch.randn(*lanes, 3, dtype=D, generator=noise), torch.rand(*lanes, 3, dtype=D, generator=noise)
    results = []
    for mapped in (vmap, loop):
        mean, var = (t.clone() for t in start)
        with torch.inference_mode(around == "inference"):
            results.append((with_lanes(f, by, around, mapped)(x.clone(), mean, var), mean, var))
    assert_same(*results)


def test_statistics_made_inside_are_updated_in_the_lanes_that_run(way):
    def f(x):
        mean, var = torch.zeros(3, dtype=D), torch.ones(3, dtype=D)
        if x.sum() > 0:
            F.batch_norm(x, mean, var, training=True)
        torch.batch_norm_update_stats(x * 2, mean, var, 0.1)
        return mean + var if var.sum() > 3 else mean - var

    x = torch.randn(6, 4, 3, dtype=D, generator=torch.Generator().manual_seed(9))
    assert_same(vmap(f)(x), loop(f)(x))


def test_a_backward_pass_over_statistics_with_lanes(way):
    def f(x, mean, var):
        y = F.batch_norm(x, mean, var, training=True)
        if x.sum() > 0:
            y = y * F.batch_norm(x * 2, mean, var, training=True)
        return (y.pow(3) * x).sum()

    results = []
    for mapped in (vmap, loop):
        x = torch.randn(6, 4, 3, dtype=D, generator=torch.Generator().manual_seed(10)).requires_grad_()
        mean, var = torch.zeros(6, 3, dtype=D), torch.ones(6, 3, dtype=D)
        mapped(f)(x, mean, var).sum().backward()
        results.append((x.grad, mean, var))
    assert_same(*results)


@pytest.mark.parametrize("momentum", [0.3, None])
def test_an_ensemble_whose_members_take_different_branches(momentum, way):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(3, momentum=momentum), nn.Linear(3, 3)

        def forward(self, x):
            return self.norm(self.linear(x)) if x.sum() > 0 else self.linear(x)

    nets = [Net().to(D) for _ in range(5)]
    params, buffers = stack_module_state(nets)
    x = torch.randn(5, 4, 3, dtype=D, generator=torch.Generator().manual_seed(11))
    got = vmap(lambda p, b, x: functional_call(nets[0], {**p, **b}, (x,)))(params, buffers, x)
    assert_same(got, torch.stack([net(row) for net, row in zip(nets, x, strict=True)]))
    assert_same([*buffers.values()], [*stack_module_state(nets)[1].values()])


def part_after(m):
    def f(x):
        y = m(x)
        return y * 2 if x.sum() > 0 else -y

    return f


def part_by_the_norm(m):
    def f(x):
        y = m(x)
        return y * 2 if y.flatten()[0] > 0.01 else m(-y)

    return f


def part_around(m):
    return lambda x: m(x) if x.sum() > 0 else m(x * 2) * 2


def part_often(m):
    return repeated(m, None)


def part_as_written(m):
    def f(x):
        out = [m(x)]
        exec("out.append(out[0] * 2) if x.sum() > 0 else out.append(-out[0])")
        return out[1]

    return f


INSIDE = [part_after, part_by_the_norm, part_around, part_often, part_as_written]
OF_A_MEMBER = {
    "value": lambda f: f,
    "grad": lambda f: lambda p, b: tuple(grad(cubes(lambda p: f(p, b)))(p).values()),
    "jvp": lambda f: lambda p, b: jvp(lambda p: f(p, b), (p,), (p,)),
}


@pytest.mark.filterwarnings("ignore::lanewise.errors.SlowPathWarning")
@pytest.mark.parametrize("momentum", [0.3, None])
@pytest.mark.parametrize("use", OF_A_MEMBER)
@pytest.mark.parametrize("name", ["batch 1d", "batch 2d", "instance"])
def test_an_ensemble_inside_which_examples_part(name, use, momentum):
    make, shape = NORMS[name]
    models = [make(momentum or 0.3 if name == "instance" else momentum).to(D) for _ in range(3)]
    for k, model in enumerate(models):
        model.running_mean += 0.3 * k
    base, x = copy.deepcopy(models[0]), torch.randn(shape, dtype=D, generator=torch.Generator().manual_seed(14))
    params, buffers = stack_module_state(models)
    params = {"scale": torch.arange(1.0, 4.0, dtype=D), **{key: p.detach() for key, p in params.items()}}

    def member(inside, mapped):
        def f(p, b):
            own = {key: p[key] for key in p if key != "scale"}
            return mapped(inside(lambda x: functional_call(base, (own, b), (x * p["scale"],))))(x)

        return OF_A_MEMBER[use](f)

    for inside, chunk_size in itertools.product(INSIDE, [None, 2]):
        parted.clear()  # a first call, and one that knows
        run = vmap(member(inside, vmap), chunk_size=chunk_size)
        one, other = [{key: b.clone() for key, b in buffers.items()} for _ in range(2)]
        for _ in range(2):
            got = run(params, one)
            rows = [[{key: t[k] for key, t in state.items()} for k in range(3)] for state in (params, other)]
            assert_same(got, loop(member(inside, loop))(*rows))
            assert_same([*one.values()], [*other.values()])


@pytest.mark.parametrize("name", ["batch 1d", "instance"])
def test_a_batch_without_lanes_where_lanes_part(name):
    """It is one update, as of what is the same in all lanes; with lanes around, one in each of these."""
    make, shape = NORMS[name]
    x, zs = torch.randn(shape, dtype=D), torch.tensor([1.0, -2.0, 3.0], dtype=D)
    module = make(0.3).to(D)
    buffers = {key: b.clone().expand(3, *b.shape).clone() for key, b in module.named_buffers()}
    other = copy.deepcopy(module)

    def parts(y, z):
        return y * z if z > 0 else -y

    for _ in range(2):
        vmap(lambda z: parts(module(x[0]), z))(zs)
        vmap(lambda b: vmap(lambda z: parts(functional_call(other, b, (x[0],)), z))(zs))(buffers)
        other(x[0])
        assert_same(tuple(module.buffers()), tuple(other.buffers()))
        assert_same(tuple(buffers.values()), tuple(b.expand(3, *b.shape) for b in other.buffers()))


@pytest.mark.parametrize("name", ["batch 1d", "instance"])
def test_images_of_lanes_around_where_lanes_part(name):
    """Captured statistics: each pair of lanes makes its update."""
    make, shape = NORMS[name]
    x, zs = torch.randn(shape, dtype=D), torch.tensor([1.0, -2.0, 3.0], dtype=D)
    module = make(0.3).to(D)
    check(
        module,
        lambda m: tuple(
            lambda x, mapped=mapped: mapped(lambda x: mapped(lambda z: m(x) * z if z > 0 else -m(x))(zs))(x)
            for mapped in (vmap, loop)
        ),
        x,
    )


def test_updates_with_lanes_around_one_without_are_refused():
    module, fixed = nn.BatchNorm1d(3), torch.randn(4, 3)
    inner = Inside(module)
    for f, name in (
        (lambda x: module(x) + module(fixed) + module(x), str(module)),
        (lambda x: inner(x) + inner(fixed) + inner(x), f"`layers.1`, {module}"),
        (lambda x: by_hand(module, x) + by_hand(module, fixed) + by_hand(module, x), "batch norm"),
    ):
        with pytest.raises(RuntimeError) as caught:
            vmap(f)(torch.randn(5, 4, 3))
        _check_text(str(caught.value), name)


def by_hand(module, x):
    return nn.functional.batch_norm(x, module.running_mean, module.running_var, training=True)


class Inside(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.layers = nn.Sequential(nn.Identity(), norm)

    def forward(self, x):
        return self.layers(x)


def _check_text(text, name):
    assert text.startswith(
        f"vmap: {name}: the running statistics [3], made outside the mapped function, were updated with statistics "
        "of each lane, then without lanes, and now with lanes again: a loop would make all these updates for one "
        f"example before any for the next\n  at {__file__}"
    )


def test_one_count_for_statistics_with_lanes_is_refused_where_it_is_a_weight():
    module, x = nn.BatchNorm1d(3, momentum=None), torch.randn(5, 4, 3)
    buffers = {"running_mean": torch.zeros(5, 3), "running_var": torch.ones(5, 3)}
    with pytest.raises(RuntimeError, match="would count on from lane to lane"):
        vmap(lambda b, x: functional_call(module, b, (x,)))(buffers, x)
    module.momentum = 0.1
    vmap(lambda b, x: functional_call(module, b, (x,)))(buffers, x)
    assert int(module.num_batches_tracked) == 5 + 1
