"""Every private torch name the package uses, in one place, each with why and what its loss would mean.

Nothing here belongs to torch's own transform engine; the one name that mentions it only asks whether it is running.
"""

import functools
import importlib
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch
import torch._C._autograd
import torch._C._dynamo.eval_frame
import torch._decomp
import torch._library.custom_ops
import torch._library.simple_registry
import torch._ops
import torch.autograd.forward_ad
import torch.autograd.function
import torch.autograd.functional
import torch.autograd.graph
import torch.multiprocessing.reductions
import torch.nn.modules.batchnorm
import torch.nn.modules.module
import torch.nn.utils.parametrize
import torch.utils._mode_utils
import torch.utils._python_dispatch
import torch.utils._pytree
import torch.utils.checkpoint

# Flattening of containers. Also the registry where users' own containers are known; without it: optree or our own.
pytree = torch.utils._pytree

# The class of one overload of an operation, to check what is registered; `type(torch.ops.aten.add.Tensor)` otherwise.
OpOverload = torch._ops.OpOverload

# Makes the wrapper tensors of a plane. Documented for tensor subclasses, private in name; without it, no engine.
make_wrapper = torch.Tensor._make_wrapper_subclass
# For views taken in place, which `torch.utils.swap_tensors` refuses to put where they are referred to.
swap_tensor_impl = torch._C._swap_tensor_impl
use_count = torch.Tensor._use_count  # type: ignore[attr-defined]
# Turns `__torch_function__` off for the wrappers, so that a call reaches the dispatcher directly (saves ~1 us a call).
disabled_torch_function = torch._C._disabled_torch_function_impl

# Thread-local dispatch state: read when a level opens and put back when a rule enters the plane below. Without them
# an inner operation would run with autograd switched off, and composite operations would arrive undecomposed.
ForceDispatchKeyGuard = torch._C._ForceDispatchKeyGuard
ExcludeDispatchKeyGuard = torch._C._ExcludeDispatchKeyGuard
include_key = torch._C._dispatch_tls_set_dispatch_key_included
exclude_key = torch._C._dispatch_tls_set_dispatch_key_excluded
tls_include_set = torch._C._dispatch_tls_local_include_set
tls_exclude_set = torch._C._dispatch_tls_local_exclude_set
tls_is_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
tls_is_included = torch._C._dispatch_tls_is_dispatch_key_included
DispatchKey = torch._C.DispatchKey
# Switched off in inference mode and inside kernels: what runs there has no derivative.
AUTOGRAD_KEY = DispatchKey.AutogradOther
DispatchKeySet = torch._C.DispatchKeySet
dispatch_keys_of = torch._C._dispatch_keys
has_kernel_for_key = torch._C._dispatch_has_kernel_for_dispatch_key


def has_composite_kernel(name: str) -> bool:
    """Whether an operation has a kernel made of other operations, which stands for that of any device."""
    return not has_kernel_for_key(name, "CompositeImplicitAutograd") and (
        has_kernel_for_key(name, "CompositeExplicitAutograd")
        or has_kernel_for_key(name, "CompositeExplicitAutogradNonFunctional")
    )


def _dispatch_key(name: str) -> torch._C.DispatchKey:
    key = torch._C._parse_dispatch_key(name)
    assert key is not None, f"this torch has no dispatch key {name}"
    return key


# A dispatch key that torch keeps for its own tests and nothing else uses; while a transform runs it is switched on, so
# that kernels registered on it see the factories. Without it: a TorchFunctionMode (0.6-2 us for every call).
FACTORY_KEY = _dispatch_key("TESTING_ONLY_GenericMode")
FACTORY_KEY_NAME = "TESTING_ONLY_GenericMode"
FACTORY_KEY_SET = DispatchKeySet(FACTORY_KEY)

# A key of hardware that torch has no kernels for, of lower priority than autograd and than the wrappers' own key. While
# a transform runs it is switched on, and sees the operations whose operands are all from outside the function. Without
# it: what is computed from these alone takes no lane values.
OUTSIDE_KEY = _dispatch_key("FPGA")
OUTSIDE_KEY_NAME = "FPGA"
INSIDE_KEY_SET = FACTORY_KEY_SET | DispatchKeySet(OUTSIDE_KEY)

# Its neighbour, for operations that are written out while reverse passes are nested. Without it, their higher
# derivatives are as wrong as torch's own.
ORDER_KEY = _dispatch_key("TESTING_ONLY_GenericWrapper")
ORDER_KEY_NAME = "TESTING_ONLY_GenericWrapper"
ORDER_KEY_SET = DispatchKeySet(ORDER_KEY)
BATCHED_KEY = _dispatch_key("Batched")  # of cotangents of `torch.autograd.grad(..., is_grads_batched=True)`

# Switched off while a backend kernel runs; tells a copy that a kernel makes for itself from one that the user makes.
ADINPLACE_OR_VIEW_KEY = _dispatch_key("ADInplaceOrView")


# Methods that are the same operation as the overload of that name, and reach it 0.4 us sooner. Only names whose method
# takes the same operands in the same order.
_SAME_METHOD = frozenset(
    "abs acos acosh add asin asinh atan atan2 atanh ceil cos cosh div eq erf erfc exp expm1 floor ge gt le log log10 "
    "log1p log2 lt maximum minimum mul ne neg pow reciprocal relu round rsqrt sigmoid sign sin sinh sqrt square sub "
    "tan tanh trunc".split()
)

_SAME_REDUCTION = frozenset(("aten::amax", "aten::amin", "aten::mean.dim", "aten::sum.dim_IntList"))


def fast_binding(op: torch._ops.OpOverload) -> Callable:
    """The quickest callable for an overload; without the private ones, the overload itself."""
    packet, _, overload = op.name().removeprefix("aten::").partition(".")
    if op.name() in _SAME_REDUCTION:
        return getattr(torch._C.TensorBase, packet)
    if packet in _SAME_METHOD and not overload.endswith("_mode"):
        return getattr(torch._C.TensorBase, packet)
    return op._op


# Whether two tensors share memory, in 0.2 us: comparing their storages takes 1.
is_alias_of = torch._C._is_alias_of  # type: ignore[attr-defined]

# Grad mode without the cost of the public context managers (0.05 us against 1 us); plain setters otherwise.
is_inference_mode_enabled = torch.is_inference_mode_enabled
is_grad_enabled = torch.is_grad_enabled
set_grad_enabled = torch._C._set_grad_enabled
is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
set_fwd_grad_enabled = torch._C._set_fwd_grad_enabled

# What torch.autograd.grad calls after checking its arguments, which costs 10 us more than small backward passes.
enter_engine_plainly = torch.autograd.graph._engine_run_backward


def enter_engine_through(run: Callable) -> None:
    """Make torch.autograd enter its engine through `run`, which calls `enter_engine_plainly`.

    A gradient with lanes must not be put into the `.grad` of a tensor without. Without it: `.backward()` leaks there.
    """
    torch.autograd._engine_run_backward = run  # type: ignore[attr-defined]


# What torch.jit.trace records into, None where it does not run. Without it, a traced transform would be a constant.
jit_tracing_state = torch._C._get_tracing_state

# The number that autograd will give to the next node of its graph in this thread: older nodes were there before.
# Without it, gradients inside a mapped function leave out paths through its arguments.
next_node_number = torch._C._autograd._get_sequence_nr


def node_number(node: Any) -> int:
    """The number of a node of the graph; leaves have the highest of all."""
    return node._sequence_nr()


# The class of the nodes that add to the `.grad` of a leaf. Without it: the node of any leaf's graph shows it.
AccumulateGrad = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]


# True while any autocast is on; without it: `torch.is_autocast_enabled` for each device type.
is_any_autocast_enabled = torch._C._is_any_autocast_enabled

# Number of active TorchDispatchModes, and the means to set them aside and back. Without them, modes would see wrappers.
dispatch_mode_count = torch._C._len_torch_dispatch_stack
function_mode_count = torch._C._len_torch_function_stack
dispatch_mode_at = torch._C._get_dispatch_stack_at
pop_dispatch_mode = torch.utils._python_dispatch._pop_mode
push_dispatch_mode = torch.utils._python_dispatch._push_mode

# Sees every operation, to measure the memory that a chunk of lanes takes. Without it: chunk_size="auto" needs a number.
TorchDispatchMode = torch.utils._python_dispatch.TorchDispatchMode

# Which backward runs in this thread (-1: none): an ended level's wrapper is in order there. Hooks for what it saves.
current_graph_task_id = torch._C._current_graph_task_id
saves_by_hooks = torch._C._autograd._top_saved_tensors_default_hooks

# Which formula a running backward is in; without it, writing through a mask of lanes has no gradient for the values.
current_autograd_node = torch._C._current_autograd_node


# Whether the running backward pass comes to a node of the graph. Without it: it may.
will_execute = torch._C._will_engine_execute_node


def operand_shape(node: Any, position: int) -> Any:
    """The shape of an operand of the operation that a node of the graph stands for; None if it needs no gradient."""
    source, place = node.next_functions[position]
    return None if source is None else source._input_metadata[place].shape


# Makes a kernel that reads the memory of a wrapper raise instead of reading nowhere.
forbid_data_pointer = torch._C._set_throw_on_mutable_data_ptr

# Lets an in-place view operation change the metadata of a wrapper itself instead of dispatching to the plane.
no_dispatch = torch.utils._mode_utils.no_dispatch

# Says whether torch's own transforms are active, to refuse the mixture; never used to drive them.
peer_engine_active = torch._C._are_functorch_transforms_active

# torch's table of decompositions, read for a vetted list of operations only.
decomposition_table = torch._decomp.decomposition_table

# The live level of native forward-mode differentiation (-1: none).
forward_ad = torch.autograd.forward_ad


def lead_inputs_of_functional(kept: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Make torch.autograd.functional take `kept(input)` where it is to be differentiated through, but for None.

    It detaches an input that requires no gradient, which cuts the tangent of a forward mode around.
    """
    functional = torch.autograd.functional
    plain = functional._grad_preprocess

    def preprocess(inputs: tuple, create_graph: bool, need_graph: bool) -> tuple:
        found = [kept(each) if create_graph else None for each in inputs]
        return tuple(
            plain((each,), create_graph, need_graph)[0] if leaf is None else leaf.requires_grad_(need_graph)
            for each, leaf in zip(inputs, found, strict=True)
        )

    functional._grad_preprocess = preprocess


# `forward_ad.make_dual` without what it does at its first call: it compiles decompositions with torch.jit, which takes
# a second and warns; the operations concerned have rules here. Without it: that function.
make_dual = torch._VF._make_dual  # type: ignore[attr-defined]


def forward_level() -> int:
    """The current native forward-mode level, -1 if none."""
    return forward_ad._current_level


def saved_tensor_hooks() -> object:
    """The saved-tensor hooks in force, None if there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


# The base of every autograd.Function; its `setup_context` tells new-style Functions from old-style ones.
single_level_setup_context = torch.autograd.function._SingleLevelFunction.setup_context

# The base of all Functions, torch's own that are not of the class `Function` too.
AnyFunction = torch.autograd.function._SingleLevelFunction
_apply = torch._C._FunctionBase.__dict__["apply"]

# Up to torch 2.13, `Function.apply` is a Python function that looks for the next `apply` on that base: one set there
# sees every application, also through a bound `MyFunction.apply` that the user took earlier. From torch 2.14 on it is
# the function of the extension itself, and what was bound earlier cannot be led elsewhere, only noticed.
APPLY_IS_PYTHON = isinstance(torch.autograd.Function.__dict__["apply"], classmethod)


class _Expected(threading.local):
    """Whether the next node of a Function in this thread is made by `apply_plainly`."""

    here = False


_expected = _Expected()


def apply_plainly(cls: type, /, *args: object, **kwargs: object) -> Any:
    """Record a Function on the plane of its operands, whatever planes there are below."""
    if APPLY_IS_PYTHON:
        return _apply.__get__(None, cls)(*args, **kwargs)
    _expected.here = True
    try:
        return _apply.__get__(None, cls)(*args, **kwargs)
    finally:
        _expected.here = False


def lead_applications(apply: Callable, passed_by: Callable[[type], None]) -> None:
    """Make `apply` see every application of a Function; `passed_by` is told the Function of one that it cannot see."""
    AnyFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    if APPLY_IS_PYTHON:
        return

    def outermost(cls: type, /, *args: object, **kwargs: object) -> Any:
        # Transforms of torch.func that run have the first say, then call `AnyFunction.apply`.
        return (apply_plainly if peer_engine_active() else apply)(cls, *args, **kwargs)

    def made(node: Any) -> None:
        if not _expected.here:
            passed_by(node._forward_cls)
        _expected.here = False

    torch.autograd.Function.apply = classmethod(outermost)  # type: ignore[assignment]
    torch.autograd.function.BackwardCFunction.__init__ = made  # type: ignore[assignment]


def with_defaults(cls: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments as forward takes them, by position where it can; up to torch 2.13 `Function.apply` has done it."""
    if APPLY_IS_PYTHON or cls.setup_context is single_level_setup_context:
        return args, kwargs
    return torch.autograd.function._bind_default_args(cls.forward, args, kwargs)  # type: ignore[attr-defined]


# What the two kinds of `checkpoint` keep of the function, to run it again in a backward pass.
CheckpointFrame: Any = torch.utils.checkpoint._CheckpointFrame
CheckpointFunction: Any = torch.utils.checkpoint.CheckpointFunction
# Until torch 2.11, `checkpoint` keeps its arguments by a Function that is never pulled back: as they are, on any plane.
CheckpointInputs = getattr(torch.utils.checkpoint, "_NoopSaveInputs", None)

# How a function under `checkpoint`, run again, is stopped once all is found. Without it: taken for an error of lanes.
StopRecomputation: Any = torch.utils.checkpoint._StopRecomputationError
# The modes of `create_selective_checkpoint_contexts`, which keep results and give them in place of computing again.
SELECTIVE_CHECKPOINT_MODES: list[Any] = [
    getattr(torch.utils.checkpoint, name)
    for name in ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
    if hasattr(torch.utils.checkpoint, name)
]


def user_vmap_rule(op: Any) -> Callable | None:
    """The rule that a user gave a custom operator by `register_vmap`. Without it: the operator runs once per lane."""
    definition = torch._library.custom_ops.OPDEFS.get(op.name())
    return None if definition is None else definition._vmap_fn


def preserve_version(*tensors: torch.Tensor) -> Any:
    """A context in which writes to these tensors count no new version. Without it: writes through `Tensor.data`."""
    return torch.autograd.grad_mode._unsafe_preserve_version_counter(tensors)


# Says whether a piece of memory is still in use anywhere. Without it: it counts as in use until the transform ends.
StorageWeakRef = torch.multiprocessing.reductions.StorageWeakRef


def has_module_hooks(module: torch.nn.Module) -> bool:
    """Whether hooks run when a module is called.

    Without the names: calling the module, whose forward is then opaque.
    """
    from_all = torch.nn.modules.module
    return bool(
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        or module._compiled_call_impl is not None
        or from_all._global_forward_hooks
        or from_all._global_forward_pre_hooks
        or from_all._global_backward_hooks
        or from_all._global_backward_pre_hooks
    )


# The class of all BatchNorms, synchronized and lazy ones too; without: the public classes.
BatchNormBase = torch.nn.modules.batchnorm._BatchNorm


def forget_parametrized(owner: torch.nn.Module, name: str) -> None:
    """Drop a tensor that `parametrize.cached()` keeps, so that one given in its place is seen, and later is not."""
    torch.nn.utils.parametrize._cache.pop((id(owner), name), None)


def never_compile(function: object) -> None:
    """Keep `torch.compile` from tracing this function and all that it calls: it breaks its graph there.

    The public `torch.compiler.disable` wraps the function, and imports the compiler (a second); where the hook is gone,
    a compiled function called inside a transform is an error of the compiler.
    """
    run_as_written(function.__code__)  # type: ignore[attr-defined]
    function._torchdynamo_disable = True  # type: ignore[attr-defined]


def run_as_written(code: CodeType) -> None:
    """The same for calls that a compiled function does not make itself, and for the functions inside."""
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(code, frames._FrameExecStrategy(skip, skip))
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            run_as_written(constant)


_COMPILER = "torch._dynamo.eval_frame"
compiler_is_loaded: Callable[[], bool] = functools.partial(sys.modules.__contains__, _COMPILER)


def compile_outside(inside: Callable[[], Any], plain: dict[str, Callable], routed: dict[str, Callable]) -> bool:
    """Call compiled functions as they are written where `inside()`; False if the compiler is not loaded, or not wholly.

    Its table of torch's functions is made of what names lead to when it first compiles, which another thread may do
    while they lead elsewhere: it gets both.
    """
    frames = sys.modules.get(_COMPILER)
    own = getattr(frames, "_callback_from_stance", None)
    if own is None:
        return False
    table: dict[Any, Any] = {}
    count_frames = getattr(frames, "set_fullgraph_compiled_frame_count", lambda count: -1)

    def callback(compiler: Any) -> Any:
        nonlocal table
        if inside():
            count_frames(-1)  # not at all: with fullgraph=True, none would be an error
            return None
        if not table:
            table = importlib.import_module("torch._dynamo.trace_rules").get_torch_obj_rule_map()
            for name, function in plain.items():
                if (kind := table.get(function) or table.get(routed[name])) is not None:
                    table[function] = table[routed[name]] = kind
        return own(compiler)

    frames._callback_from_stance = callback  # type: ignore[union-attr]
    return True


def look_up_rules(kinds: dict[type, dict[int, Callable]]) -> None:
    """Find the rules that are registered for classes of tensors in one dict each, by the id of the operation.

    torch looks for one before each operation on any class of its own kind, through three calls: 0.4 us. It keeps the
    function that looks at its first use: where another class came before, it stays the slower one, which finds the
    same.
    """
    registry = torch._library.simple_registry
    own = getattr(registry, "find_torch_dispatch_rule", None)
    if own is None:
        return

    def find(op: Any, torch_dispatch_class: type) -> Any:
        rules = kinds.get(torch_dispatch_class)
        return own(op, torch_dispatch_class) if rules is None else rules.get(id(op))

    never_compile(find)
    registry.find_torch_dispatch_rule = find


# Autocast keys are left out below every plane: a value is cast once, on the plane where the user's code runs.
AUTOCAST_KEYS = DispatchKeySet(DispatchKey.AutocastCPU)
for _name in ("CUDA", "MPS", "XPU", "HPU", "MTIA", "PrivateUse1", "IPU", "XLA"):
    if hasattr(DispatchKey, f"Autocast{_name}"):
        AUTOCAST_KEYS = AUTOCAST_KEYS | DispatchKeySet(getattr(DispatchKey, f"Autocast{_name}"))


def script_alike(function: object, plain: object) -> None:
    """Let torch.jit.script take `function` for the operation that it takes `plain` for.

    Without it, what is scripted while a level is open (torch's own formulas of forward mode, at their first use) is an
    error of the compiler where it calls a function that is led elsewhere.
    """
    builtins = torch.jit._builtins  # type: ignore[attr-defined]
    known = builtins._find_builtin(plain)
    if known is not None:
        builtins._register_builtin(function, known)


# Scripted code; its calls are led elsewhere where operands are wrappers.
ScriptFunction: Any = torch._C.ScriptFunction
ScriptMethod: Any = torch._C.ScriptMethod
# Runs the graphs of scripted code as they were written, if they have not been optimized before.
unoptimized = functools.partial(torch.jit.optimized_execution, False)  # type: ignore[attr-defined]


def function_of_graph(graph: Any) -> Any:
    """A graph of scripted code as a function of its own, which nothing has been made of."""
    return torch._C._create_function_from_graph("written", graph.copy())


def is_composition(func: Any) -> bool:
    """Whether torch has a kernel that makes the operation of others; `_can_decompose` counts those in Python, too."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), DispatchKey.CompositeImplicitAutograd)


def keys_of_autocast() -> DispatchKeySet:
    """Keys that cast where the operation was called whose handler runs: the user's code under autocast, or none."""
    with torch._C._RestorePythonTLSSnapshot():  # type: ignore[attr-defined]
        return AUTOCAST_KEYS - tls_exclude_set()


def cast_as_called() -> ForceDispatchKeyGuard:
    """Inside, operations are cast as where the operation was called whose handler runs."""
    return ForceDispatchKeyGuard(tls_include_set(), tls_exclude_set() - keys_of_autocast())


@functools.cache
def operator_names(prefix: str) -> list[str]:
    """Names of all operators that begin with `prefix`. Without the listing: write out the families it is used for."""
    return sorted(name for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix))


def higher_order_modules(name: str) -> list[Any]:
    """Where torch keeps a control-flow function besides `torch` itself.

    Where they are gone, `torch.cond` and `torch.while_loop` are served still, the others raise inside a transform.
    """
    package = importlib.import_module("torch._higher_order_ops")
    module = importlib.import_module(f"torch._higher_order_ops.{name}")
    return [package, module]


def serve_higher_order(operator: Any, key: Any, run: Callable) -> None:
    """What a higher-order operator does while a dispatch key is on, but for a trace of the compiler's.

    Without it `torch.cond` raises in `grad` outside every other transform, and its second derivative is zero.
    """
    key_set = DispatchKeySet(key)
    fake = torch._C._TorchDispatchModeKey.FAKE

    def kernel(*args: Any) -> Any:
        if torch._C._get_dispatch_mode(fake) is None:
            return run(*args)
        with ExcludeDispatchKeyGuard(key_set):
            return operator(*args)

    operator.py_impl(key)(kernel)


def generator_identity(generator: torch.Generator) -> int:
    """Which generator it is: a kernel gets a new Python object for it each time.

    Without the name, the numbers drawn from a user's generator would depend on the chunks.
    """
    return generator._cdata  # type: ignore[attr-defined]
