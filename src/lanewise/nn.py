"""Modules as functions of their parameters and buffers, for use inside transforms."""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lanewise._control.abreast.running import NOT_PURE
from lanewise._control.abreast.running import call as call_abreast
from lanewise._control.abreast.values import FUNCTIONS, Declined
from lanewise._control.runtime.callees import fn
from lanewise._torch_compat import BatchNormBase, forget_parametrized
from lanewise._transforms.reruns import in_force
from lanewise.errors import ArgumentError, TransformError, at_user_line

_ABSENT = object()


def functional_call(
    module: nn.Module,
    parameter_and_buffer_dicts: dict[str, Tensor] | Sequence[dict[str, Tensor]],
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
    strict: bool = False,
) -> Any:
    """Call `module` with the given parameters and buffers in place of its own.

    The module itself is as before afterwards, also when the call raises. A buffer that the module writes in place is
    written in the tensor you gave; a buffer that it rebinds (`self.count = self.count + 1`) is replaced in your dict.

    Args:
        module: The module to call.
        parameter_and_buffer_dicts: Tensors by the names of `named_parameters()` and `named_buffers()`; one dict, or a
            sequence of dicts without a name in common. A name that is left out keeps the module's own tensor. The name
            of a parametrized tensor replaces the result of its parametrization.
        args: Positional arguments: a tuple, or one argument that is not a tuple.
        kwargs: Keyword arguments.
        tie_weights: Whether a tensor given for one name also stands in for all names tied to it in the module.
        strict: Whether unknown and missing names are errors.

    Returns:
        What the module returns.

    Raises:
        ValueError: Not a dict or dicts; a name in two dicts; two values for one (tied or shared) tensor.
        RuntimeError: With `strict`, unknown or missing names; a scripted or data-parallel module.
        TypeError: A value, or what the name stands for in the module, is not a tensor.
        AttributeError: The name's submodule does not exist.

    Example:
        >>> import torch
        >>> from lanewise import functional_call
        >>> model = torch.nn.Linear(2, 1)
        >>> params = {"weight": torch.tensor([[1.0, 2.0]]), "bias": torch.tensor([0.5])}
        >>> functional_call(model, params, torch.tensor([3.0, 4.0]))
        tensor([11.5000])
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise TransformError(
            at_user_line(
                "functional_call: The stateless API can't be used with Jitted modules; pass the eager one",
                "functional_call(eager_module, params, args)",
            )
        )
    if isinstance(module, nn.DataParallel):
        raise TransformError(
            at_user_line(
                "functional_call: The stateless API can't be used with nn.DataParallel module; pass `module.module`",
                "functional_call(module.module, params, args)",
            )
        )
    dicts = _disjoint_dicts(parameter_and_buffer_dicts)
    values = {name: value for given in dicts for name, value in given.items()}
    if tie_weights:
        values = _with_tied_names(module, values)
    if strict:
        _check_names(module, values)
    if args is None:
        args = ()
    elif not isinstance(args, tuple):
        args = (args,)
    with _swapped(module, values) as slots:
        result = fn(module)(*args, **(kwargs or {}))
        left = {name: slot.get() for name, slot in slots.items() if slot.filled()}
    for given in dicts:
        given.update({name: left[name] for name in given if name in left and left[name] is not given[name]})
    return result


def _called_abreast(
    module: nn.Module,
    parameter_and_buffer_dicts: Any,
    args: Any = None,
    kwargs: dict[str, Any] | None = None,
    *,
    tie_weights: bool = True,
) -> Any:
    """The same where lanes stay abreast, for modules whose parameters each have a name of their own."""
    values = {name: value for given in _disjoint_dicts(parameter_and_buffer_dicts) for name, value in given.items()}
    own = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    if len({id(tensor) for _, tensor in own}) < len(own) or not values.keys() <= {name for name, _ in own}:
        raise Declined
    held = []
    try:
        for name, value in values.items():
            path, _, attribute = name.rpartition(".")
            owner = module.get_submodule(path)
            store: Any = owner._parameters if attribute in owner._parameters else owner._buffers
            held.append((store, attribute, store[attribute]))
            store[attribute] = value
        args = () if args is None else args if isinstance(args, tuple) else (args,)
        return call_abreast(module, *args, **(kwargs or {}))
    finally:
        for store, attribute, before in held:
            store[attribute] = before


FUNCTIONS[functional_call] = _called_abreast
NOT_PURE.add(functional_call)


def stack_module_state(models: Sequence[nn.Module] | nn.ModuleList) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Stack the parameters and the buffers of like modules, to run the ensemble with `vmap`.

    The stacked parameters are new leaves, which an optimizer takes as they are.

    Args:
        models: At least one module; all of one class, with the same shapes and the same training modes.

    Returns:
        `(params, buffers)`: tensors `[len(models), *S]` by name.

    Raises:
        RuntimeError: No model, or models that differ in class, training mode, names, shapes or `requires_grad`.

    Example:
        >>> import torch
        >>> from lanewise import functional_call, stack_module_state, vmap
        >>> models = [torch.nn.Linear(3, 2) for _ in range(5)]
        >>> params, buffers = stack_module_state(models)
        >>> params["weight"].shape
        torch.Size([5, 2, 3])
        >>> def run(params, buffers, x):
        ...     return functional_call(models[0], (params, buffers), x)
        >>> vmap(run, in_dims=(0, 0, None))(params, buffers, torch.ones(4, 3)).shape
        torch.Size([5, 4, 2])
    """
    if not (hasattr(models, "__len__") and hasattr(models, "__getitem__")):
        raise TypeError(
            at_user_line(
                f"stack_module_state: Expected a list of models, got a {type(models).__qualname__}",
                "stack_module_state([model])" if isinstance(models, nn.Module) else "stack_module_state(list(models))",
            )
        )
    if len(models) == 0:
        raise _not_alike("Expected at least one model, got 0.", "stack_module_state([model_0, model_1])")
    first = models[0]
    for number, model in enumerate(models):
        if type(model) is not type(first):
            raise _not_alike(
                f"Expected all models to be of the same class, but models[0] is a {type(first).__qualname__} and "
                f"models[{number}] a {type(model).__qualname__}",
                _LIKE,
            )
        _check_same_mode(first, model, number)
    params = _stacked([dict(model.named_parameters()) for model in models])
    buffers = _stacked([dict(model.named_buffers()) for model in models])
    return params, buffers


def replace_all_batch_norm_modules_(root: nn.Module) -> nn.Module:
    """Make every BatchNorm under `root` use the statistics of its batch only, in place.

    Running statistics are dropped: `running_mean`, `running_var`, `num_batches_tracked` become None and
    `track_running_stats` False.

    Args:
        root: The module to change.

    Returns:
        `root`.

    Example:
        >>> import torch
        >>> from lanewise import replace_all_batch_norm_modules_
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4))
        >>> replace_all_batch_norm_modules_(net)[1].running_mean is None
        True
    """
    for module in root.modules():
        if isinstance(module, BatchNormBase) and module.track_running_stats:
            module.running_mean = None
            module.running_var = None
            module.num_batches_tracked = None
            module.track_running_stats = False
    return root


class _Properties:
    """The properties of a module's class, read and written like a dict."""

    def __init__(self, owner: nn.Module) -> None:
        self.owner = owner

    def __contains__(self, name: str) -> bool:
        return hasattr(self.owner, name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self.owner, name)

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self.owner, name, value)

    def pop(self, name: str, default: Any) -> Any:
        raise AssertionError(f"a property stays: {name}")


class _GivenTensor(nn.Module):
    """Stands in for a parametrization: its result is the tensor given for it."""

    def __init__(self, value: Tensor | None) -> None:
        super().__init__()
        # Past nn.Module.__setattr__, which would register a Parameter.
        self.__dict__["value"] = value

    def forward(self) -> Tensor | None:
        return vars(self)["value"]


class _Slot:
    """The one place of a module that holds a tensor: the dict that its owner keeps it in, and the key there."""

    __slots__ = ("owner", "attribute", "store", "parametrized", "held", "before")

    def __init__(self, owner: nn.Module, attribute: str) -> None:
        self.owner, self.attribute, self.parametrized = owner, attribute, False
        self.store: Any
        if attribute in owner._parameters:
            self.store = owner._parameters
        elif attribute in owner._buffers:
            self.store = owner._buffers
        elif parametrize.is_parametrized(owner, attribute):
            self.parametrized = True
            self.store = owner.get_submodule("parametrizations")._modules
        else:
            is_property = isinstance(getattr(type(owner), attribute, None), property)
            self.store = _Properties(owner) if is_property else vars(owner)
            now = getattr(owner, attribute, None)
            if now is not None and not isinstance(now, Tensor):
                raise TypeError(
                    f"functional_call: attribute `{attribute}` of {owner._get_name()}: {type(now).__name__} is not an "
                    "instance of torch.Tensor"
                )
        self.held = attribute in self.store
        self.before = self.store[attribute] if self.held else None

    def filled(self) -> bool:
        return self.attribute in self.store

    def get(self) -> Any:
        held = self.store[self.attribute]
        return held() if self.parametrized else held

    def set(self, value: Tensor | None) -> None:
        if self.parametrized:
            forget_parametrized(self.owner, self.attribute)
            self.store[self.attribute] = _GivenTensor(value)
        else:
            self.store[self.attribute] = value

    def restore(self) -> None:
        if self.parametrized:
            forget_parametrized(self.owner, self.attribute)
        if self.held:
            self.store[self.attribute] = self.before
        else:
            self.store.pop(self.attribute, None)


def _slots(module: nn.Module, values: dict[str, Tensor]) -> dict[str, _Slot]:
    """The slot of each name. A submodule shared under two names has one place under both, for one value."""
    slots: dict[str, _Slot] = {}
    owners: dict[str, nn.Module] = {"": module}
    first_names: dict[tuple[int, str], str] = {}
    for name, value in values.items():
        path, _, attribute = name.rpartition(".")
        if not attribute:
            raise KeyError(f'functional_call: tensor name can\'t be empty string "", but one of the names is {name!r}')
        if value is not None and not isinstance(value, Tensor):
            raise TypeError(f"functional_call: the value of {name!r}, {value!r}, is not an instance of torch.Tensor")
        if path not in owners:
            owners[path] = _submodule(module, path)
        owner = owners[path]
        first = first_names.setdefault((id(owner), attribute), name)
        if values[first] is not value:
            raise ArgumentError(
                f"functional_call got multiple values for keys {sorted([first, name])}, which are one tensor of a "
                "submodule that stands in the module under two names. Give one of them"
            )
        slots[name] = _Slot(owner, attribute)
    return slots


def _submodule(module: nn.Module, path: str) -> nn.Module:
    for step in path.split("."):
        part = module._modules[step] if step in module._modules else getattr(module, step, _ABSENT)
        if part is _ABSENT:
            raise AttributeError(
                f"{module._get_name()} has no attribute `{step}` (functional_call: submodule {path!r})"
            )
        if not isinstance(part, nn.Module):
            raise TypeError(f"functional_call: submodule `{path}`: {part} is not an instance of torch.nn.Module")
        module = part
    return module


@contextmanager
def _swapped(module: nn.Module, values: dict[str, Tensor]) -> Iterator[dict[str, _Slot]]:
    """Put the values into their slots for the time of the context, and where a `checkpoint` inside runs again."""
    slots = _slots(module, values)
    before = in_force.swaps
    in_force.swaps = (*before, functools.partial(_swapped, module, values))
    try:
        for name, slot in slots.items():
            slot.set(values[name])
        yield slots
    finally:
        in_force.swaps = before
        for slot in slots.values():
            slot.restore()


def _disjoint_dicts(given: Any) -> Sequence[dict[str, Tensor]]:
    if isinstance(given, dict):
        return (given,)
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ArgumentError(
            at_user_line(
                "functional_call: Expected parameter_and_buffer_dicts to be a dict, or a list/tuple of dicts, "
                f"but got {type(given)}",
                "functional_call(module, dict(module.named_parameters()), args)",
            )
        )
    for number, part in enumerate(given):
        if not isinstance(part, dict):
            raise ArgumentError(
                at_user_line(
                    "functional_call: Expected all elements of parameter_and_buffer_dicts to be dictionaries, but "
                    f"element {number} is a {type(part).__name__}",
                    "functional_call(module, (params, buffers), args)  # dicts by name",
                )
            )
    names = [name for part in given for name in part]
    repeated = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
    if repeated:
        raise ArgumentError(
            at_user_line(
                f"functional_call: {repeated} appeared in multiple dictionaries; behavior of functional call is "
                "ambiguous. Give each name once",
                "functional_call(module, {**params, **buffers}, args)  # the last one counts",
            )
        )
    return given


def _named_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers under all their names. (The module's own methods walk its parts four times.)"""
    for store in (module._parameters, module._buffers):
        for name, tensor in store.items():
            if tensor is not None:
                yield prefix + name, tensor
    for name, part in module._modules.items():
        if part is not None:
            yield from _named_tensors(part, f"{prefix}{name}.")


def _with_tied_names(module: nn.Module, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """`values`, and for each name in it the names tied to it."""
    named = list(_named_tensors(module))
    if len({id(tensor) for _, tensor in named}) == len(named):
        return values
    names_of: dict[int, list[str]] = {}
    for name, tensor in named:
        names_of.setdefault(id(tensor), []).append(name)
    result = dict(values)
    for names in names_of.values():
        given = [name for name in names if name in values]
        if len(names) == 1 or not given:
            continue
        if any(values[name] is not values[given[0]] for name in given):
            raise ArgumentError(
                at_user_line(
                    f"functional_call got multiple values for keys {sorted(names)}, which are tied. Consider using "
                    "tie_weights=False, or give one of them",
                    "functional_call(module, params, args, tie_weights=False)",
                )
            )
        result.update(dict.fromkeys(names, values[given[0]]))
    return result


def _check_names(module: nn.Module, values: dict[str, Tensor]) -> None:
    known = {name for name, _ in _named_tensors(module)}
    problems = [
        f"{what} key(s): {', '.join(map(repr, sorted(names)))}."
        for what, names in (("Unexpected", values.keys() - known), ("Missing", known - values.keys()))
        if names
    ]
    if problems:
        raise TransformError(
            at_user_line(
                f"functional_call: Error(s) in reparametrizing for {module._get_name()}:\n\t" + "\n\t".join(problems),
                "params = dict(module.named_parameters())  # and buffers: dict(module.named_buffers())",
            )
        )


_LIKE = "models = [Net() for _ in range(5)]  # of one class and one size"


def _not_alike(why: str, instead: str) -> TransformError:
    return TransformError(at_user_line(f"stack_module_state: {why}", instead))


def _check_same_mode(first: nn.Module, model: nn.Module, number: int) -> None:
    modes = {name: part.training for name, part in first.named_modules()}
    for name, part in model.named_modules():
        if modes.get(name, part.training) != part.training:
            where = f"submodule {name!r}" if name else "the model"
            raise _not_alike(
                f"Expected all models to have the same training/eval mode, but {where} is in "
                f"{'training' if part.training else 'eval'} mode in models[{number}] and not in models[0]",
                "for model in models: model.train()  # or model.eval()",
            )


def _stacked(states: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    first = states[0]
    for number, state in enumerate(states):
        if state.keys() != first.keys():
            raise _not_alike(
                f"Expected all models to have the same parameters and buffers, but models[0] and models[{number}] "
                f"differ in {sorted(state.keys() ^ first.keys())}",
                _LIKE,
            )
    return {name: _stacked_leaf(name, [state[name] for state in states]) for name in first}


def _stacked_leaf(name: str, tensors: list[Tensor]) -> Tensor:
    first = tensors[0]
    for number, tensor in enumerate(tensors):
        if tensor.requires_grad != first.requires_grad:
            raise _not_alike(
                f"Expected {name} from each model to have the same .requires_grad, but it is {first.requires_grad} in "
                f"models[0] and {tensor.requires_grad} in models[{number}]",
                "for model in models: model.requires_grad_(True)  # or False",
            )
        if tensor.shape != first.shape:
            raise _not_alike(
                f"stack expects each tensor to be equal size, but {name} is {list(first.shape)} in models[0] and "
                f"{list(tensor.shape)} in models[{number}]",
                _LIKE,
            )
    stacked = torch.stack(tensors)
    return stacked.detach().requires_grad_() if first.requires_grad else stacked
