"""Modules as functions: against the plain module, and against torch.func as a peer."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from lanewise import functional_call, grad, replace_all_batch_norm_modules_, stack_module_state, vmap


class Counter(nn.Module):
    """Counts its calls in a buffer that it rebinds, and one that it writes in place."""

    written: torch.Tensor

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("rebound", torch.zeros(()))
        self.register_buffer("written", torch.zeros(()))
        self.register_buffer("absent", None)

    def forward(self, x, fail_with=None):
        self.rebound = self.rebound + 1
        self.written.add_(1)
        if fail_with is not None:
            raise fail_with
        return x * self.weight


class Shared(nn.Module):
    """One submodule under two names, and one parameter tied to another module's."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.again = self.first
        self.last = nn.Linear(3, 3)
        self.last.weight = self.first.weight

    def forward(self, x, fail_with=None):
        if fail_with is not None:
            raise fail_with
        return self.last(torch.tanh(self.again(x)) + self.first(x))


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x

    def right_inverse(self, x):
        return x / 2


def state_of(module):
    """Every tensor of the module by name, as the same objects, and its versions; and every plain attribute."""
    tensors = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    attributes = {
        (name, key)
        for name, part in module.named_modules(remove_duplicate=False)
        for key in [*vars(part), *part._parameters, *part._buffers, *part._modules]
    }
    return [(name, id(tensor), tensor._version) for name, tensor in tensors], attributes


def fresh(module):
    """New tensors for all names of the module."""
    named = [*module.named_parameters(), *module.named_buffers()]
    return {name: torch.randn(tensor.shape).to(tensor.dtype) for name, tensor in named}


MODULES = [
    (lambda: nn.Linear(3, 2), (4, 3)),
    (lambda: nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)), (4, 3)),
    (lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2).eval(), nn.ReLU()), (2, 1, 5, 5)),
    (lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), (2, 3, 4)),
    (lambda: nn.GRUCell(3, 4), (2, 3)),
]


@pytest.mark.parametrize(("make", "shape"), MODULES)
def test_the_result_is_that_of_a_module_with_these_tensors(make, shape):
    module, x = make(), torch.randn(shape)
    before = state_of(module)
    values = {name: value.abs() for name, value in fresh(module).items()}
    other = copy.deepcopy(module)
    other.load_state_dict(values, strict=False)
    expected = other(x)

    split = ({k: v for k, v in values.items() if "weight" in k}, {k: v for k, v in values.items() if "weight" not in k})
    for given in (values, split, list(split)):
        torch.testing.assert_close(functional_call(module, given, x), expected)
        torch.testing.assert_close(functional_call(module, given, (x,)), expected)
        torch.testing.assert_close(functional_call(module, given, x, strict=True), expected)
    torch.testing.assert_close(torch.func.functional_call(module, values, x), expected)
    assert state_of(module) == before


def test_arguments():
    module = nn.Bilinear(2, 3, 1)
    values, x, y = fresh(module), torch.randn(2), torch.randn(3)
    expected = functional_call(module, values, (x, y))
    assert torch.equal(functional_call(module, values, x, {"input2": y}), expected)
    assert torch.equal(functional_call(module, values, kwargs={"input1": x, "input2": y}), expected)
    assert torch.equal(functional_call(module, values, None, {"input1": x, "input2": y}), expected)


def test_a_name_left_out_keeps_the_modules_tensor():
    module, x = nn.Linear(3, 2), torch.randn(3)
    weight = torch.randn(2, 3)
    assert torch.equal(functional_call(module, {"weight": weight}, x), nn.functional.linear(x, weight, module.bias))
    assert torch.equal(functional_call(module, {}, x), module(x))
    assert torch.equal(functional_call(module, (), x), module(x))


def test_gradients_reach_the_given_tensors_and_the_kept_ones():
    module, x = nn.Linear(3, 1), torch.randn(3)
    weight = torch.randn(1, 3, requires_grad=True)
    functional_call(module, {"weight": weight}, x).sum().backward()
    assert weight.grad is not None and torch.equal(weight.grad, x[None])
    assert module.weight.grad is None
    assert module.bias.grad is not None and torch.equal(module.bias.grad, torch.ones(1))


@pytest.mark.parametrize("split", [False, True])
def test_buffers_changed_by_the_module_are_in_the_dicts(split):
    module = Counter()
    before = state_of(module)
    rebound, written = torch.tensor(5.0), torch.tensor(7.0)
    buffers = {"rebound": rebound, "written": written}
    params = {"weight": torch.ones(3)}
    given: Any = (params, buffers) if split else {**params, **buffers}
    functional_call(module, given, torch.ones(3))
    held = buffers if split else given
    assert held["rebound"] == 6 and rebound == 5
    assert held["written"] is written and written == 8
    assert params["weight"] is (params if split else given)["weight"]
    assert state_of(module) == before


def test_none_and_absent_buffers():
    module = Counter()
    assert functional_call(module, {"absent": torch.ones(1)}, torch.ones(3)).shape == (3,)
    assert module.absent is None
    linear = nn.Linear(3, 2)
    without_bias: Any = {"bias": None}
    result = functional_call(linear, without_bias, torch.ones(3))
    assert torch.equal(result, nn.functional.linear(torch.ones(3), linear.weight))


@pytest.mark.parametrize("tie_weights", [True, False])
def test_shared_submodules_are_as_before(tie_weights):
    module, x = Shared(), torch.randn(2, 3)
    before = state_of(module)
    weight = torch.randn(3, 3)
    functional_call(module, {"first.weight": weight, "again.weight": weight}, x, tie_weights=tie_weights)
    assert state_of(module) == before


def test_tied_names():
    module, x = Shared(), torch.randn(2, 3)
    weight, bias = torch.randn(3, 3), module.first.bias
    hidden = nn.functional.linear(x, weight, bias)
    tied = nn.functional.linear(torch.tanh(hidden) + hidden, weight, module.last.bias)
    for name in ("first.weight", "again.weight", "last.weight"):
        assert torch.equal(functional_call(module, {name: weight}, x), tied)
    untied = nn.functional.linear(torch.tanh(hidden) + hidden, module.last.weight, module.last.bias)
    assert torch.equal(functional_call(module, {"first.weight": weight}, x, tie_weights=False), untied)


def test_two_values_for_one_tensor():
    module, x = Shared(), torch.randn(2, 3)
    before = state_of(module)
    one, two = torch.randn(3, 3), torch.randn(3, 3)
    phrase = r"got multiple values for keys \['again.weight', 'first.weight', 'last.weight'\], which are tied"
    with pytest.raises(ValueError, match=phrase):
        functional_call(module, {"first.weight": one, "last.weight": two}, x)
    phrase = r"functional_call got multiple values for keys \['again.weight', 'first.weight'\]"
    with pytest.raises(ValueError, match=phrase):
        functional_call(module, {"first.weight": one, "again.weight": two}, x, tie_weights=False)
    functional_call(module, {"first.weight": one, "last.weight": one}, x)
    functional_call(module, {"first.weight": one, "last.weight": two}, x, tie_weights=False)
    assert state_of(module) == before


@pytest.mark.parametrize("error", [ValueError("stop"), KeyboardInterrupt(), SystemExit()])
@pytest.mark.parametrize("make", [Counter, Shared])
def test_after_an_exception_module_and_dicts_are_as_before(make, error):
    module = make()
    before = state_of(module)
    given = fresh(module)
    kept = dict(given)
    with pytest.raises(type(error)):
        functional_call(module, given, torch.randn(2, 3), {"fail_with": error})
    assert state_of(module) == before
    assert given.keys() == kept.keys() and all(given[name] is kept[name] for name in kept)


@pytest.mark.parametrize(
    ("given", "error", "phrase"),
    [
        ({"weight": torch.zeros(2, 3), "bias": 3.0}, TypeError, "'bias', 3.0, is not an instance of torch.Tensor"),
        ({"weight": torch.zeros(2, 3), "sub.x": torch.zeros(1)}, AttributeError, "Linear has no attribute `sub`"),
        ({"weight": torch.zeros(2, 3), "in_features": torch.zeros(1)}, TypeError, "`in_features` .* an instance of"),
        ({"weight": torch.zeros(2, 3), "in_features.x": torch.zeros(1)}, TypeError, "an instance of torch.nn.Module"),
        ({"weight": torch.zeros(2, 3), "": torch.zeros(1)}, KeyError, "be empty string"),
        (({"weight": torch.zeros(1)}, {"weight": torch.zeros(1)}), ValueError,
         r"\['weight'\] appeared in multiple dictionaries; behavior of functional call is ambiguous"),
        (({"weight": torch.zeros(1)}, 3), ValueError, "all elements of parameter_and_buffer_dicts to be dictionaries"),
        (3, ValueError, "Expected parameter_and_buffer_dicts to be a dict, or a list/tuple of dicts, but got .*int"),
        ("weight", ValueError, "Expected parameter_and_buffer_dicts to be a dict, .* got .*str"),
    ],
)  # fmt: skip
def test_what_cannot_be_swapped_in_is_refused(given, error, phrase):
    module = nn.Linear(3, 2)
    before = state_of(module)
    with pytest.raises(error, match=phrase):
        functional_call(module, given, torch.ones(3))
    assert state_of(module) == before


def test_strict():
    module = nn.Linear(3, 2)
    unexpected, missing = r"Unexpected key\(s\): 'more', 'sub.x'.", r"Missing key\(s\): 'bias'."
    phrase = rf"Error\(s\) in reparametrizing for Linear:\n\t{unexpected}\n\t{missing}"
    values = {"weight": torch.zeros(2, 3), "sub.x": torch.zeros(1), "more": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=phrase):
        functional_call(module, values, torch.ones(3), strict=True)


def test_an_unknown_name_is_an_attribute_during_the_call_only():
    class Reads(nn.Module):
        extra: torch.Tensor

        def forward(self):
            return self.extra + 1

    module = Reads()
    for extra in (torch.ones(2), nn.Parameter(torch.ones(2))):
        assert torch.equal(functional_call(module, {"extra": extra}), torch.full((2,), 2.0))
        assert not hasattr(module, "extra") and not list(module.parameters())


def test_plain_attributes_and_properties():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale, self.hidden = torch.ones(2), torch.ones(2)

        @property
        def offset(self):
            return self.hidden

        @offset.setter
        def offset(self, value):
            self.hidden = value

        def forward(self, x):
            return x * self.scale + self.offset

    module = Scaled()
    before, scale, hidden = state_of(module), module.scale, module.hidden
    given = {"scale": nn.Parameter(torch.full((2,), 3.0)), "offset": torch.full((2,), 10.0)}
    assert torch.equal(functional_call(module, given, torch.ones(2)), torch.full((2,), 13.0))
    assert state_of(module) == before and module.scale is scale and module.hidden is hidden


def test_a_module_that_is_false():
    class Empty(nn.Sequential):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x):
            return x * self.scale

        def __len__(self):
            return 0

    assert torch.equal(functional_call(Empty(), {"scale": torch.zeros(2)}, torch.ones(2)), torch.zeros(2))


def test_parametrized_tensors():
    module, x = nn.Linear(3, 2, bias=False), torch.randn(3)
    parametrize.register_parametrization(module, "weight", Doubled())
    before = state_of(module)
    weight = torch.randn(2, 3, requires_grad=True)
    original = {"parametrizations.weight.original": weight}
    assert torch.equal(functional_call(module, original, x), nn.functional.linear(x, 2 * weight))
    result = functional_call(module, {"weight": weight}, x)
    assert torch.equal(result, nn.functional.linear(x, weight))
    assert torch.equal(torch.autograd.grad(result.sum(), weight)[0], x.expand(2, 3))
    assert state_of(module) == before
    with parametrize.cached():
        own = module(x)
        assert torch.equal(functional_call(module, {"weight": weight}, x), nn.functional.linear(x, weight))
        assert torch.equal(module(x), own)


def test_modules_that_cannot_be_called_so():
    with pytest.raises(RuntimeError, match="can't be used with nn.DataParallel module"):
        functional_call(nn.DataParallel(nn.Linear(3, 2)), {}, torch.ones(3))


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:.*torch.jit.*:FutureWarning")
def test_scripted_modules():
    with pytest.raises(RuntimeError, match="can't be used with Jitted modules"):
        functional_call(torch.jit.script(nn.Linear(3, 2)), {}, torch.ones(3))


def test_a_call_inside_a_call():
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)

        def forward(self, x):
            replaced = functional_call(self.inner, {"weight": torch.eye(2)}, x)
            return replaced + self.inner(x)

    module, x = Outer(), torch.randn(2)
    before = state_of(module)
    result = functional_call(module, {"inner.weight": 2 * torch.eye(2)}, x)
    assert torch.equal(result, 3 * x)
    assert state_of(module) == before


def test_stacked_state():
    models = [nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).eval() for _ in range(4)]
    params, buffers = stack_module_state(models)
    peer_params, peer_buffers = torch.func.stack_module_state(models)
    assert list(params) == list(peer_params) and list(buffers) == list(peer_buffers)
    for name, value in params.items():
        assert torch.equal(value, torch.stack([dict(model.named_parameters())[name] for model in models]))
        assert value.is_leaf and value.requires_grad
    for name, value in buffers.items():
        assert torch.equal(value, torch.stack([dict(model.named_buffers())[name] for model in models]))
        assert not value.requires_grad and value.dtype == peer_buffers[name].dtype
    assert stack_module_state(nn.ModuleList(models))[0].keys() == params.keys()


def test_an_ensemble_by_vmap_is_the_loop_over_models():
    models = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(5)]
    params, buffers = stack_module_state(models)
    x = torch.randn(6, 3)

    def run(params, buffers, x):
        return functional_call(models[0], (params, buffers), x)

    expected = torch.stack([model(x) for model in models])
    torch.testing.assert_close(vmap(run, in_dims=(0, 0, None))(params, buffers, x), expected)
    own_data = torch.randn(5, 6, 3)
    expected = torch.stack([model(rows) for model, rows in zip(models, own_data)])
    torch.testing.assert_close(vmap(run)(params, buffers, own_data), expected)


def test_buffers_of_an_ensemble_are_rebound_lane_by_lane():
    models = [Counter() for _ in range(3)]
    params, buffers = stack_module_state(models)
    buffers["rebound"] = torch.tensor([0.0, 10.0, 20.0])

    def run(params, buffers, x):
        out = functional_call(models[0], (params, buffers), x)
        return out, buffers

    out, after = vmap(run, in_dims=(0, 0, None))(params, buffers, torch.ones(3))
    assert torch.equal(out, params["weight"])
    assert torch.equal(after["rebound"], torch.tensor([1.0, 11.0, 21.0]))
    assert torch.equal(after["written"], torch.ones(3))
    assert torch.equal(buffers["rebound"], torch.tensor([0.0, 10.0, 20.0]))


def test_per_sample_gradients_are_those_of_a_loop():
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    params = {name: value.detach() for name, value in model.named_parameters()}
    inputs, targets = torch.randn(5, 3), torch.randn(5, 2)

    def loss(params, x, target):
        return (functional_call(model, params, x) - target).square().sum()

    grads = vmap(grad(loss), in_dims=(None, 0, 0))(params, inputs, targets)
    for i in range(5):
        model.zero_grad()
        (model(inputs[i]) - targets[i]).square().sum().backward()
        for name, value in model.named_parameters():
            torch.testing.assert_close(grads[name][i], value.grad)


def test_under_compile():
    model = nn.Linear(3, 2)
    params = {name: torch.randn_like(value) for name, value in model.named_parameters()}
    before = state_of(model)

    def rows(params, x):
        return vmap(lambda x: functional_call(model, params, x))(x)

    x = torch.randn(5, 3)
    compiled = torch.compile(rows, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(params, x), nn.functional.linear(x, params["weight"], params["bias"]))
    assert state_of(model) == before


def with_frozen_part(frozen):
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    model[1].train(not frozen)
    return model


def without_bias_grad():
    model = nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    return model


@pytest.mark.parametrize(
    ("models", "phrase"),
    [
        ([], "Expected at least one model, got 0"),
        ([nn.Linear(2, 2), nn.Linear(2, 2).eval()], "same training/eval mode, but the model is in eval mode in models"),
        ([with_frozen_part(True), with_frozen_part(False)], "training/eval mode, but submodule '1' is in training"),
        ([nn.Linear(2, 2), nn.Identity()], r"the same class, but models\[0\] is a Linear and models\[1\] a Identity"),
        ([nn.Linear(2, 2), without_bias_grad()], "Expected bias from each model to have the same .requires_grad"),
        ([nn.Linear(2, 2), nn.Linear(3, 2)], r"each tensor to be equal size, but weight is \[2, 2\] in models\[0\]"),
        ([nn.Linear(2, 2), nn.Linear(2, 2, bias=False)], r"same parameters and buffers, but .* differ in \['bias'\]"),
    ],
)  # fmt: skip
def test_models_that_do_not_stack(models, phrase):
    with pytest.raises(RuntimeError, match=phrase):
        stack_module_state(models)


def test_batch_norm_replacement():
    net = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm2d(2, momentum=None), nn.ReLU())
    )
    x = torch.randn(3, 1, 5, 5)
    expected = copy.deepcopy(net)(x)
    assert replace_all_batch_norm_modules_(net) is net
    assert not list(net.buffers())
    assert not any(part.track_running_stats for part in net.modules() if isinstance(part, nn.BatchNorm2d))
    assert torch.equal(net(x), expected)
    assert torch.equal(net.eval()(x), expected)


@pytest.mark.parametrize("make", [nn.BatchNorm1d, nn.BatchNorm3d, nn.SyncBatchNorm])
def test_batch_norm_replacement_at_the_root(make):
    assert replace_all_batch_norm_modules_(make(2)).running_mean is None


def test_other_norms_keep_their_statistics():
    norm = nn.InstanceNorm1d(2, track_running_stats=True)
    assert replace_all_batch_norm_modules_(norm).running_mean is not None


class Checkpointed(nn.Module):
    """Part of it is run again in a backward pass, after `functional_call` has returned; a part of that once more."""

    def __init__(self, reentrant: bool):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.reentrant = reentrant

    def forward(self, x):
        inner = lambda x: checkpoint(lambda x: self.second(x).sin(), x, use_reentrant=self.reentrant)
        return self.last(checkpoint(lambda x: inner(self.first(x).tanh()), x, use_reentrant=self.reentrant))


def gradients_of(model, params, x, at_x) -> Any:
    model = copy.deepcopy(model)
    model.load_state_dict(params)
    model.reentrant = False
    x = x.clone().requires_grad_()
    model(x).square().sum().backward()
    return x.grad if at_x else {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("at_x", [False, True], ids=["parameters", "input"])
@pytest.mark.parametrize("kind", ["reentrant", "not reentrant"])
@pytest.mark.parametrize("way", ["grad", "vmap(grad)", "ensemble", "grad(vmap)", "vmap, outside", "no transform"])
def test_functional_call_of_a_module_with_checkpoints(way, kind, at_x):
    if kind == "reentrant" and way in ("vmap, outside", "no transform"):
        pytest.skip("torch refuses torch.autograd.grad of it")
    model = Checkpointed(kind == "reentrant").double()
    ensemble = [{name: p.detach() * n for name, p in model.named_parameters()} for n in (2.0, -1.0)]
    stacked = {name: torch.stack([params[name] for params in ensemble]) for name in ensemble[0]}
    xs = torch.randn(2, 3, dtype=torch.float64)
    loss: Any = lambda params, x: functional_call(model, params, x).square().sum()
    of_first: list = [gradients_of(model, ensemble[0], x, at_x) for x in xs]
    as_stack = lambda found: torch.stack(found) if at_x else {k: torch.stack([g[k] for g in found]) for k in found[0]}
    argnum = int(at_x)
    if way == "grad":
        got, want = grad(loss, argnum)(ensemble[0], xs[0]), of_first[0]
    elif way == "vmap(grad)":
        got, want = vmap(grad(loss, argnum), in_dims=(None, 0))(ensemble[0], xs), as_stack(of_first)
    elif way == "ensemble":
        got = vmap(grad(loss, argnum))(stacked, xs)
        want = as_stack([gradients_of(model, params, x, at_x) for params, x in zip(ensemble, xs)])
    elif way == "grad(vmap)":
        got = grad(lambda params, xs: vmap(loss, in_dims=(None, 0))(params, xs).sum(), argnum)(ensemble[0], xs)
        want = as_stack(of_first) if at_x else {k: sum(g[k] for g in of_first) for k in of_first[0]}
    else:
        params = {name: p.clone().requires_grad_() for name, p in ensemble[0].items()}
        leaf = xs.clone().requires_grad_()
        if way == "vmap, outside":
            out = vmap(loss, in_dims=(None, 0))(params, leaf).sum()
        else:
            out = sum(loss(params, x) for x in leaf)
        found = torch.autograd.grad(out, [*params.values(), leaf])
        got = found[-1] if at_x else dict(zip(params, found))
        want = as_stack(of_first) if at_x else {k: sum(g[k] for g in of_first) for k in of_first[0]}
    torch.testing.assert_close(got, want)
