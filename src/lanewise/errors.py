"""What the library raises and warns about. Each class derives from the type that torch raises for the same mistake."""

import functools
import linecache
import os
import re
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")

_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep

__all__ = [
    "ArgumentError",
    "CapturedWriteError",
    "CheckError",
    "DimensionError",
    "EscapedTensorError",
    "FunctionError",
    "LaneValueError",
    "LanewiseError",
    "RandomnessError",
    "SlowPathWarning",
    "TransformError",
]


class LanewiseError(Exception):
    """Base of all errors of this library, so that `except lanewise.errors.LanewiseError` catches them all."""


class ArgumentError(LanewiseError, ValueError):
    """An argument of a transform, or of the mapped function, does not fit.

    Cause: `vmap(f, in_dims=1)(torch.ones(3))`, where dim 1 does not exist.
    Mended: `vmap(f, in_dims=0)(torch.ones(3))`.
    """


class DimensionError(LanewiseError, IndexError):
    """A dim that a tensor does not have.

    Cause: `vmap(lambda x: x, out_dims=5)(torch.ones(3, 2))`, whose result has two dims, the lanes included.
    Mended: `vmap(lambda x: x, out_dims=1)(torch.ones(3, 2))`.
    """


class TransformError(LanewiseError, RuntimeError):
    """A transform cannot do what the function asks of it.

    Cause: `grad(lambda x: x * 2)(torch.ones(3))`, whose output is not a scalar.
    Mended: `grad(lambda x: (x * 2).sum())(torch.ones(3))`.
    """


class FunctionError(LanewiseError, NotImplementedError):
    """A custom `torch.autograd.Function` lacks what the transform needs.

    Cause: `jvp` through a Function without a `jvp` staticmethod, whose backward is marked `@once_differentiable`.
    Mended: give the Function a `jvp` staticmethod.
    """


class LaneValueError(LanewiseError, RuntimeError):
    """A Python value was asked of a tensor that differs from lane to lane, where lanes cannot take different ways.

    Cause: `vmap(lambda x: "large" if x > 1 else "small")(xs)`: no tensor can hold the results of all lanes.
    Mended: `vmap(lambda x: x > 1)(xs)`, or `out_dims="list"`.
    """


class CheckError(LanewiseError, RuntimeError):
    """A check by `error_if` failed.

    Cause: `error_if(x, x < 0, "negative")` where x is negative in some lane.
    Mended: what the message asks for.

    Attributes:
        lanes: The lanes it failed for, pairs of numbers in nested `vmap`s; empty outside `vmap`.
    """

    def __init__(self, message: str, lanes: list) -> None:
        super().__init__(message)
        self.lanes = lanes


class RandomnessError(LanewiseError, RuntimeError):
    """A random operation was called where the transform's `randomness` does not allow it.

    Cause: `vmap(lambda x: x + torch.rand(2))(xs)`.
    Mended: `vmap(lambda x: x + torch.rand(2), randomness="different")(xs)`.
    """


class CapturedWriteError(LanewiseError, RuntimeError):
    """A value that differs from lane to lane would be written into a tensor without lanes.

    Cause: `total = torch.zeros(3)` outside, `vmap(lambda x: total.add_(x))(xs)`.
    Mended: `total = vmap(lambda x: x)(xs).sum(0)`.
    """


class EscapedTensorError(LanewiseError, RuntimeError):
    """A lane tensor was used after the transform that made it had ended.

    Cause: `kept = []`, `vmap(lambda x: kept.append(x) or x)(xs)`, then `kept[0] + 1`.
    Mended: return the value from the mapped function.
    """


class SlowPathWarning(UserWarning):
    """What runs once per lane, or once for each of many ways that lanes take. The numbers are right.

    Cause: an operation without a batching rule; code that runs as it was written, such as a generator, or a `while`
        that appends to a list, where each of many lanes takes another way through it.
    Mended: what the message says, such as a tensor in place of the list.
    """


def _torch_folder() -> str:
    return os.path.dirname(sys.modules["torch"].__file__ or "") + os.sep


_STANDARD_LIBRARY = os.path.dirname(os.__file__) + os.sep


def _is_users(name: str) -> bool:
    if name.startswith(_STANDARD_LIBRARY) and "-packages" not in name:
        return False
    return not name.startswith((_PACKAGE, _torch_folder(), "<frozen"))


def user_frame() -> traceback.FrameSummary | None:
    """The innermost frame outside this package and torch: the line the user wrote."""
    frame = _user_frame()
    if frame is None:
        return None
    name = frame.f_code.co_filename
    return traceback.FrameSummary(
        name, frame.f_lineno, frame.f_code.co_name, line=linecache.getline(name, frame.f_lineno).strip()
    )


class Step(NamedTuple):
    """A call that is running.

    Attributes:
        code: Its code.
        names: The globals of that.
        line: The line that it has come to.
        asks: The library's own function that it has called there, by its name; empty if none.
    """

    code: types.CodeType
    names: dict
    line: int
    asks: str = ""

    @property
    def users(self) -> bool:
        """Whether the code is the user's."""
        return _is_users(self.code.co_filename)


def calls_within(own: str) -> list[Step]:
    """The calls of the user's and of libraries that run, innermost first, within the library's own function `own`."""
    found: list[Step] = []
    frame, asks = sys._getframe(1), ""
    while frame is not None:
        code = frame.f_code
        if not _is_own(code):
            found.append(Step(code, frame.f_globals, frame.f_lineno, asks))
        elif code.co_name == own:
            break
        asks = code.co_name if _is_own(code) else ""
        frame = frame.f_back
    return found


def user_call() -> Step | None:
    """The innermost call of the user's code."""
    frame = _user_frame()
    return None if frame is None else Step(frame.f_code, frame.f_globals, frame.f_lineno)


def _user_frame() -> types.FrameType | None:
    frame = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def is_within(modules: str) -> bool:
    """Whether code of modules whose names begin like that is running."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(modules):
            return True
        frame = frame.f_back
    return False


def user_line() -> str:
    """`file:line: code` of the innermost user frame, or an empty string."""
    where = user_frame()
    if where is None:
        return ""
    return f"{where.filename}:{where.lineno}: {where.line}" if where.line else f"{where.filename}:{where.lineno}"


def at_user_line(text: str, instead: str = "", rows: Sequence[str] = ()) -> str:
    """`text`, one row for each thing to look at, the user's line, and what to write instead, as one message."""
    parts = [text, *[f"  {row}" for row in rows]]
    line = user_line()
    if line:
        parts.append(f"  at {line}")
    if instead:
        parts.append("Write instead:\n" + "\n".join("  " + row for row in instead.splitlines()))
    return "\n".join(parts)


def note_at_user_line(error: Exception, text: str) -> None:
    """Add `text` and the user's line to an error of torch that has no note yet; Python has them from 3.11 on."""
    if hasattr(error, "add_note") and not getattr(error, "__notes__", None):
        error.add_note(at_user_line(f"lanewise: {text}"))  # type: ignore[attr-defined]


def warn_at_user_line(warning: Warning) -> None:
    """Warn as if the user's own line did: Python names it, says it once, and filters by module apply to it."""
    frame = _user_frame()
    if frame is None:
        warnings.warn(warning, stacklevel=2)
    else:
        names = frame.f_globals
        registry = names.setdefault("__warningregistry__", {})
        file, module = frame.f_code.co_filename, names.get("__name__")
        warnings.warn_explicit(warning, type(warning), file, frame.f_lineno, module, registry)


def uncounted(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """The function, which calls one of the user's in place of code of the user's.

    A warning with a `stacklevel`, or a log record, is to name the line of that code: `warnings` and `logging` count no
    frame whose file is by its name one of importlib's.
    """
    if isinstance(function, types.FunctionType):
        function.__code__ = function.__code__.replace(co_filename=_PACKAGE + "importlib._bootstrap")
    return function


def name_lanes(error: Exception, places: Sequence) -> None:
    """Put the lanes that ran on an error: the attribute `lanes`, and a note where Python has notes."""
    error.lanes = list(places)  # type: ignore[attr-defined]
    if hasattr(error, "add_note"):
        error.add_note(f"lanewise: raised while {lanes_in_words(places)} ran")  # type: ignore[attr-defined]


def lanes_in_words(places: Sequence) -> str:
    """Some lanes in a message."""
    some = ", ".join(map(str, places[:8])) + (", ..." if len(places) > 8 else "")
    return f"{'lane' if len(places) == 1 else 'lanes'} {some}"


# What layers of torch say that take a batch only.
_UNBATCHED = re.compile(r"expected (?:at least )?(\d)D(?: or \dD)? input \(got (\d)D input\)")
_NO_BATCH = "lanewise: inside vmap, an example has no batch dim\nWrite instead:\n  layer(x[None])[0]"


def note_unbatched(error: Exception) -> None:
    """Tell, in a note where Python has notes, how a layer that takes a batch takes one example."""
    found = _UNBATCHED.fullmatch(str(error)) if type(error) is ValueError else None
    if found and int(found[2]) == int(found[1]) - 1 and hasattr(error, "add_note"):
        if _NO_BATCH not in getattr(error, "__notes__", ()):
            error.add_note(_NO_BATCH)  # type: ignore[attr-defined]


def hide_own_frames(error: Exception) -> None:
    """Leave the library's own frames out of an error's traceback, where it is not the library's own mistake.

    Raised again by `raise` alone, it shows the user's frames only; on Python 3.10, with the one that raises it.

    Setting LANEWISE_FULL_TRACEBACKS in the environment keeps them.
    """
    frames, own = _frames(error)
    mistake = not own or (own[-1] and not isinstance(error, _OPERATIONS_RAISE))
    if mistake or (all(own) and not isinstance(error, LanewiseError)) or os.environ.get("LANEWISE_FULL_TRACEBACKS"):
        return
    if error.__context__ is not None and all(_frames(error.__context__)[1]):
        # What the library has tried first is no part of what went wrong.
        error.__context__ = None
    kept = [frame for frame, is_own in zip(frames, own, strict=True) if not is_own]
    for frame, following in zip(kept, [*kept[1:], None]):
        frame.tb_next = following
    error.__traceback__ = kept[0] if kept else None
    if own[0]:
        frames[0].tb_next = error.__traceback__  # Python 3.10 raises again with the traceback that it had


def shows_user_frames(function: Callable[_Given, _Result]) -> Callable[_Given, _Result]:
    """What the function raises shows the user's frames only."""

    @functools.wraps(function)
    def shown(*args: _Given.args, **kwargs: _Given.kwargs) -> _Result:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            hide_own_frames(error)
            raise

    return shown


def _frames(error: BaseException) -> tuple[list[types.TracebackType], list[bool]]:
    """The entries of a traceback, and which of them are the library's own, or of torch where the library called it."""
    frames, own = [], []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append(trace)
        own.append(_is_own(code) or (bool(own) and own[-1] and code.co_filename.startswith(_torch_folder())))
        trace = trace.tb_next
    return frames, own


# What an operation raises that does not take its operands.
_OPERATIONS_RAISE = (LanewiseError, RuntimeError, IndexError, ValueError, ZeroDivisionError)


def _is_own(code: types.CodeType) -> bool:
    """Whether code is the library's, or a part of the user's that the library put into a function of its own."""
    return code.co_filename.startswith(_PACKAGE) or (code.co_name == "<lambda>" and code.co_varnames[:1] == ("_lw_a0",))


# Code of torch that cannot work on a tensor of a plane, by where it is: what that means, and what helps.
_PEERS = (
    (
        ("nn/attention/flex_attention.py",),
        "flex_attention and its block masks use torch.func's own vmap, here on tensors of this transform. The two "
        "engines cannot be nested in this order",
        "F.scaled_dot_product_attention(q, k, v, attn_mask=mask)  # in place of flex_attention\n"
        "or call it outside, on tensors with all lanes",
    ),
    (
        ("_functorch/apis.py", "_functorch/eager_transforms.py", "_functorch/vmap.py"),
        "a transform of torch.func is called here on tensors of this transform, in a way in which the two engines "
        "cannot be nested",
        "from lanewise import vmap, grad, vjp, jvp, jacrev, jacfwd, hessian, linearize  # that of the same name",
    ),
    (
        ("jit/_trace.py",),
        "torch.jit.trace records a function here, with tensors of this transform, whose values and lanes would become "
        "constants",
        "f(x)  # call the function itself, or one that was traced outside",
    ),
    (
        ("export/",),
        "torch.export records a function here, with tensors of this transform, which have no memory that it could "
        "describe",
        "f(x)  # call the function itself, or the module of a program that was exported outside",
    ),
)

# What torch says where a kernel, or its own transforms, come upon a tensor of a plane.
_MEMORY = ("data is not allocated yet", "Cannot access data pointer of Tensor (e.g.")
_INTERNALS = (
    *_MEMORY,
    "gen_vmap_plumbing",
    "that would mutate a captured Tensor",
    "NYI: querying is_contiguous inside of vmap",
    "Cannot access data pointer of Tensor that doesn't have storage",
    "INTERNAL ASSERT FAILED",
)
_READS = (
    "a kernel of torch reads the memory of a tensor of this transform, which has none of its own",
    "x.to_dense()  # a strided tensor in place of a sparse operand; or call it outside the transform",
)


def reads_memory(error: BaseException) -> bool:
    """Whether a kernel of torch asked for the memory of a tensor that has none of its own."""
    return type(error) is RuntimeError and any(phrase in str(error) for phrase in _MEMORY)


def explained(error: BaseException | None, level: object) -> TransformError | None:
    """What an error of torch's internals that ends a transform means, None for any other error."""
    if not isinstance(error, Exception) or (isinstance(error, LanewiseError) and not isinstance(error, LaneValueError)):
        return None
    internal = type(error) is RuntimeError and any(phrase in str(error) for phrase in _INTERNALS)
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    folder = _torch_folder()
    if not internal:
        # An error of the user's own code, called by torch, is the user's.
        last = max((i for i, name in enumerate(files) if _is_users(name)), default=-1)
        files = files[last + 1 :]
    called = [name.removeprefix(folder).replace(os.sep, "/") for name in files if name.startswith(folder)]
    for where, meaning, instead in _PEERS:
        if any(name.startswith(where) for name in called):
            return _meaning(error, level, meaning, instead)
    return _meaning(error, level, *_READS) if reads_memory(error) else None


def check_not_linearized() -> None:
    """Raise inside torch.func's `linearize`, which takes tensors of a plane for constants, and gives wrong tangents."""
    frame, depth = sys._getframe(1), 8
    while frame is not None and depth:
        code = frame.f_code
        if code.co_name == "linearize" and code.co_filename.startswith(_torch_folder()):
            raise TransformError(
                at_user_line(
                    f"torch.func.linearize: {_PEERS[1][1]}",
                    "from lanewise import linearize  # with the same arguments",
                )
            )
        frame, depth = frame.f_back, depth - 1


def _meaning(error: Exception, level: object, meaning: str, instead: str) -> TransformError:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    where = f"\n  at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    rows = "\n".join("  " + row for row in instead.splitlines())
    return TransformError(f"{level!r}: {meaning}{where}\nWrite instead:\n{rows}")
