"""Every message in full: the call, the argument by name and shape, the user's line, why, and what to write instead."""

# ruff: noqa: E501 - the texts stand as they are printed

import linecache
import re
import sys
import warnings

import pytest
import torch
from torch import nn

import lanewise as lw
from lanewise import errors
from lanewise._core import missing

x, y = torch.ones(3, 2), torch.ones(4, 2)
steps = x.cumsum(0)
signs = torch.tensor([[1.0, -1.0], [1.0, 1.0]])
numbers = torch.arange(3)


def loss(x, w):
    return (x * w).sum()


def model(params, x):
    return params["w"] * x


VMAP = {
    "in_dims is a list": (
        lambda: lw.vmap(loss, in_dims=[0, 0])(x, x),
        ValueError,
        """
vmap(loss, in_dims=[0, 0])(x, w): expected `in_dims` to be int or a (potentially nested) tuple matching the structure of inputs, or a dict of argument names, got: <class 'list'>
Write instead:
  vmap(loss, in_dims=(0, 0))
""",
    ),
    "no inputs": (
        lambda: lw.vmap(loss)(),
        ValueError,
        """
vmap(loss)(): got no inputs. Maybe you forgot to add inputs, or you are trying to vmap over a function with no inputs. Keyword arguments are mapped only where `in_dims` is a dict that names them
Write instead:
  vmap(loss, axis_size=3)()  # three lanes, no inputs
""",
    ),
    "in_dim is a bool": (
        lambda: lw.vmap(loss, in_dims=(True, None))(x, y[0]),
        ValueError,
        """
vmap(loss, in_dims=(True, None))(x, w): Got in_dim=True for x, but in_dim must be either an integer dimension or None: 0 for the first, None for no lanes
Write instead:
  vmap(loss, in_dims=(0, None))
""",
    ),
    "in_dims is None": (
        lambda: lw.vmap(loss, in_dims=None)(x, x),
        ValueError,
        """
vmap(loss)(x, w): expected `in_dims` to be int or a (potentially nested) tuple matching the structure of inputs, or a dict of argument names, got: <class 'NoneType'>
Write instead:
  vmap(loss, in_dims=0)
  vmap(loss, in_dims=None, axis_size=3)  # three lanes, nothing mapped
""",
    ),
    "in_dims is a tensor": (
        lambda: lw.vmap(loss, in_dims=torch.tensor(0))(x, x),
        ValueError,
        """
vmap(loss, in_dims=tensor(0))(x, w): expected `in_dims` to be int or a (potentially nested) tuple matching the structure of inputs, or a dict of argument names, got: <class 'torch.Tensor'>
Write instead:
  vmap(loss, in_dims=0)
""",
    ),
    "keywords only": (
        lambda: lw.vmap(loss)(x=x, w=x),
        ValueError,
        """
vmap(loss)(x=x, w=w): got no inputs. Maybe you forgot to add inputs, or you are trying to vmap over a function with no inputs. Keyword arguments are mapped only where `in_dims` is a dict that names them
Write instead:
  vmap(loss, in_dims={'x': 0, 'w': 0})(x=x, w=w)
""",
    ),
    "an entry for a keyword": (
        lambda: lw.vmap(loss, in_dims=(0, 0))(x, w=x),
        ValueError,
        """
vmap(loss, in_dims=(0, 0))(x, w=w): in_dims is not compatible with the structure of `inputs`. in_dims has structure (0, 0) but inputs has structure (*,)
  in_dims is a tuple of 2, but stands for a tuple of 1: there is 1 positional argument (x)
  an argument passed by keyword (w) is mapped where in_dims is a dict
Write instead:
  vmap(loss, in_dims=0)
""",
    ),
    "in_dims by name with other keys": (
        lambda: lw.vmap(model, in_dims={"params": {"v": 0}, "x": 0})({"w": x}, x),
        ValueError,
        """
vmap(model, in_dims={'params': {'v': 0}, 'x': 0})(params, x): in_dims is not compatible with the structure of `inputs`. in_dims has structure {'params': {'v': 0}, 'x': 0} but inputs has structure ({'w': *}, *)
  in_dims['params'] has no entry for ['w'] and has an entry for ['v'], which is not there
Write instead:
  vmap(model, in_dims={'params': 0, 'x': 0})
""",
    ),
    "an array of NumPy": (
        lambda: lw.vmap(lambda x: x)(x.numpy()),
        ValueError,
        """
vmap(f)(x): Got in_dim=0 for x, but it is of type <class 'numpy.ndarray'>. We cannot vmap over non-Tensor arguments, please use None as the respective in_dim
Write instead:
  vmap(f)(torch.as_tensor(x))
""",
    ),
    "a list of numbers": (
        lambda: lw.vmap(lambda x: x)([1.0, 2.0]),
        ValueError,
        """
vmap(f)(x): Got in_dim=0 for x[0], but it is of type <class 'float'>. We cannot vmap over non-Tensor arguments, please use None as the respective in_dim
Write instead:
  vmap(f)(torch.as_tensor(x))
""",
    ),
    "only a string": (
        lambda: lw.vmap(lambda name: name)("net"),
        ValueError,
        """
vmap(f)(name): Got in_dim=0 for name, but it is of type <class 'str'>. We cannot vmap over non-Tensor arguments, please use None as the respective in_dim
Write instead:
  vmap(f, in_dims=None, axis_size=3)  # three lanes, nothing mapped
""",
    ),
    "only None": (
        lambda: lw.vmap(lambda x: x)(None),
        ValueError,
        """
vmap(f)(x): Expected at least one Tensor to vmap over: no argument is mapped
Write instead:
  vmap(f, in_dims=None, axis_size=3)  # three lanes, nothing mapped
""",
    ),
    "one example": (
        lambda: lw.vmap(torch.sin)(torch.tensor(1.0)),
        ValueError,
        """
vmap(sin)(args[0]): Got in_dim=0 for args[0], which has dimensionality 0 (shape []): expected in_dim to satisfy -0 <= in_dim < 0
Write instead:
  sin(args[0])  # one example, which has no lanes
""",
    ),
    "out_dims is a bool": (
        lambda: lw.vmap(lambda x: x, out_dims=True)(x),
        ValueError,
        """
vmap(f, out_dims=True)(x): `out_dims` must be an int, None or a python collection of ints representing where in the outputs the vmapped dimension should appear, but out_dims is True
Write instead:
  vmap(f, out_dims=0)
""",
    ),
    "out_dims deeper than the result": (
        lambda: lw.vmap(lambda x: x, out_dims=(0, 0))(x),
        ValueError,
        """
vmap(f, ..., out_dims=(0, 0)): out_dims is not compatible with the structure of `outputs`. out_dims has structure (0, 0) but outputs has structure *
  out_dims is a tuple, but stands for a single Tensor
Write instead:
  vmap(f, out_dims=0)
""",
    ),
    "a result in some lanes": (
        lambda: lw.vmap(lambda x: x if x.sum() > 4 else None)(steps),
        RuntimeError,
        """
vmap: output: lanes return different types NoneType and Tensor, which no tensor can hold: lane 0 gives None, lane 2 gives a tensor [2]
Write instead:
  return a tensor or a number, or the same value from every branch
  vmap(f, out_dims="list")(xs)  # or a list, one result for each lane
""",
    ),
    "in_dims too short": (
        lambda: lw.vmap(loss, in_dims=(0,))(x, x),
        ValueError,
        """
vmap(loss, in_dims=(0,))(x, w): in_dims is not compatible with the structure of `inputs`. in_dims has structure (0,) but inputs has structure (*, *)
  in_dims is a tuple of 1, but stands for a tuple of 2: there are 2 positional arguments (x, w)
Write instead:
  vmap(loss, in_dims=0)
""",
    ),
    "in_dims too short for shared parameters": (
        lambda: lw.vmap(lw.grad(lambda w, x, t: loss(x, w) - t), in_dims=(None, 0))(x[0], x, x[:, 0]),
        ValueError,
        """
vmap(grad(f), in_dims=(None, 0))(w, x, t): in_dims is not compatible with the structure of `inputs`. in_dims has structure (None, 0) but inputs has structure (*, *, *)
  in_dims is a tuple of 2, but stands for a tuple of 3: there are 3 positional arguments (w, x, t)
Write instead:
  vmap(grad(f), in_dims=(None, 0, 0))
""",
    ),
    "in_dims too long, with what does not fit its argument": (
        lambda: lw.vmap(model, in_dims=({"v": 0}, 1, 0))({"w": x}, x.T),
        ValueError,
        """
vmap(model, in_dims=({'v': 0}, 1, 0))(params, x): in_dims is not compatible with the structure of `inputs`. in_dims has structure ({'v': 0}, 1, 0) but inputs has structure ({'w': *}, *)
  in_dims is a tuple of 3, but stands for a tuple of 2: there are 2 positional arguments (params, x)
Write instead:
  vmap(model, in_dims=(0, 1))
""",
    ),
    "modules are mapped": (
        lambda: lw.vmap(lambda models, x: models(x))([nn.Linear(2, 1), nn.Linear(2, 1)], x),
        ValueError,
        """
vmap(f)(models, x): Got in_dim=0 for models[0], but it is of type <class 'torch.nn.modules.linear.Linear'>. We cannot vmap over non-Tensor arguments, please use None as the respective in_dim
Write instead:
  params, buffers = stack_module_state(models)
  functional_call(models[0], (params, buffers), x)  # in f
""",
    ),
    "a module is mapped": (
        lambda: lw.vmap(lambda module, x: module(x))(nn.Linear(2, 1), x),
        ValueError,
        """
vmap(f)(module, x): Got in_dim=0 for module, but it is of type <class 'torch.nn.modules.linear.Linear'>. We cannot vmap over non-Tensor arguments, please use None as the respective in_dim
Write instead:
  vmap(f, in_dims=(None, 0))
""",
    ),
    "in_dims with other keys": (
        lambda: lw.vmap(model, in_dims=({"v": 0}, 0))({"w": x}, x),
        ValueError,
        """
vmap(model, in_dims=({'v': 0}, 0))(params, x): in_dims is not compatible with the structure of `inputs`. in_dims has structure ({'v': 0}, 0) but inputs has structure ({'w': *}, *)
  in_dims[0] has no entry for ['w'] and has an entry for ['v'], which is not there
Write instead:
  vmap(model, in_dims=0)
""",
    ),
    "in_dims too long inside": (
        lambda: lw.vmap(lambda pair: pair[0], in_dims=((0, 0, 0),))((x, x)),
        ValueError,
        """
vmap(f, in_dims=((0, 0, 0),))(pair): in_dims is not compatible with the structure of `inputs`. in_dims has structure ((0, 0, 0),) but inputs has structure ((*, *),)
  in_dims[0] is a tuple of 3, but stands for a tuple of 2
Write instead:
  vmap(f, in_dims=0)
""",
    ),
    "in_dims deeper than the argument": (
        lambda: lw.vmap(loss, in_dims=((0,), 0))(x, x),
        ValueError,
        """
vmap(loss, in_dims=((0,), 0))(x, w): in_dims is not compatible with the structure of `inputs`. in_dims has structure ((0,), 0) but inputs has structure (*, *)
  in_dims[0] is a tuple, but stands for a single Tensor
Write instead:
  vmap(loss, in_dims=0)
""",
    ),
    "in_dims with an unknown name": (
        lambda: lw.vmap(loss, in_dims={"x": 0, "z": 0})(x, x),
        ValueError,
        """
vmap(loss, in_dims={'x': 0, 'z': 0})(x, w): in_dims is not compatible with the structure of `inputs`: in_dims names 'z', but the arguments are 'x', 'w'
Write instead:
  vmap(loss, in_dims={'x': 0})
""",
    ),
    "in_dim is a string": (
        lambda: lw.vmap(loss, in_dims=(0, "a"))(x, x),
        ValueError,
        """
vmap(loss, in_dims=(0, 'a'))(x, w): Got in_dim='a' for w, but in_dim must be either an integer dimension or None
Write instead:
  vmap(loss, in_dims=0)
""",
    ),
    "a number is mapped": (
        lambda: lw.vmap(loss)(x, 2.0),
        ValueError,
        """
vmap(loss)(x, w): Got in_dim=0 for w, but it is of type <class 'float'>. We cannot vmap over non-Tensor arguments, please use None as the respective in_dim
Write instead:
  vmap(loss, in_dims=(0, None))
""",
    ),
    "a string in a dict is mapped": (
        lambda: lw.vmap(model)({"w": x, "name": "net"}, x),
        ValueError,
        """
vmap(model)(params, x): Got in_dim=0 for params['name'], but it is of type <class 'str'>. We cannot vmap over non-Tensor arguments, please use None as the respective in_dim
Write instead:
  vmap(model, in_dims=({'w': 0, 'name': None}, 0))
""",
    ),
    "in_dim out of range": (
        lambda: lw.vmap(loss, in_dims=(0, 2))(x, x),
        ValueError,
        """
vmap(loss, in_dims=(0, 2))(x, w): Got in_dim=2 for w, which has dimensionality 2 (shape [3, 2]): expected in_dim to satisfy -2 <= in_dim < 2
Write instead:
  vmap(loss, in_dims=0)
""",
    ),
    "a 0-dim tensor is mapped": (
        lambda: lw.vmap(loss)(x, torch.tensor(1.0)),
        ValueError,
        """
vmap(loss)(x, w): Got in_dim=0 for w, which has dimensionality 0 (shape []): expected in_dim to satisfy -0 <= in_dim < 0
Write instead:
  vmap(loss, in_dims=(0, None))
""",
    ),
    "sizes differ": (
        lambda: lw.vmap(loss)(x, y),
        ValueError,
        """
vmap(loss)(x, w): Expected all tensors to have the same size in the mapped dimension, got sizes [3, 4] for the mapped dimension
  x: shape [3, 2], dim 0 of size 3
  w: shape [4, 2], dim 0 of size 4
Write instead:
  vmap(loss, in_dims=(0, None))  # if w is the same for all
  vmap(loss, in_dims=(None, 0))  # if x is the same for all
""",
    ),
    "a dict of parameters is mapped": (
        lambda: lw.vmap(model)({"w": y[0], "b": [x, x[:1]]}, y),
        ValueError,
        """
vmap(model)(params, x): Expected all tensors to have the same size in the mapped dimension, got sizes [2, 3, 1, 4] for the mapped dimension
  params['w']: shape [2], dim 0 of size 2
  params['b'][0]: shape [3, 2], dim 0 of size 3
  params['b'][1]: shape [1, 2], dim 0 of size 1
  x: shape [4, 2], dim 0 of size 4
Write instead:
  vmap(model, in_dims=(None, 0))  # if params is the same for all
""",
    ),
    "the size of a parameter is that of a layer": (
        lambda: lw.vmap(model)({"w": x, "b": x, "c": y}, y),
        ValueError,
        """
vmap(model)(params, x): Expected all tensors to have the same size in the mapped dimension, got sizes [3, 3, 4, 4] for the mapped dimension
  params['w']: shape [3, 2], dim 0 of size 3
  params['b']: shape [3, 2], dim 0 of size 3
  params['c']: shape [4, 2], dim 0 of size 4
  x: shape [4, 2], dim 0 of size 4
Write instead:
  vmap(model, in_dims=(None, 0))  # if params is the same for all
""",
    ),
    "a dict of parameters with a number is mapped": (
        lambda: lw.vmap(model)({"w": x, "scale": torch.tensor(1.0)}, y),
        ValueError,
        """
vmap(model)(params, x): Got in_dim=0 for params['scale'], which has dimensionality 0 (shape []): expected in_dim to satisfy -0 <= in_dim < 0
Write instead:
  vmap(model, in_dims=(None, 0))
""",
    ),
    "one example for many parameters": (
        lambda: lw.vmap(model)({"w": x, "b": x}, y[0]),
        ValueError,
        """
vmap(model)(params, x): Expected all tensors to have the same size in the mapped dimension, got sizes [3, 3, 2] for the mapped dimension
  params['w']: shape [3, 2], dim 0 of size 3
  params['b']: shape [3, 2], dim 0 of size 3
  x: shape [2], dim 0 of size 2
Write instead:
  vmap(model, in_dims=(0, None))  # if x is the same for all
  vmap(model, in_dims=(None, 0))  # if params is the same for all
""",
    ),
    "two of three sizes differ": (
        lambda: lw.vmap(lambda a, b, c: a)({"w": x, "b": y}, x, y[:2]),
        ValueError,
        """
vmap(f)(a, b, c): Expected all tensors to have the same size in the mapped dimension, got sizes [3, 4, 3, 2] for the mapped dimension
  a['w']: shape [3, 2], dim 0 of size 3
  a['b']: shape [4, 2], dim 0 of size 4
  b: shape [3, 2], dim 0 of size 3
  c: shape [2, 2], dim 0 of size 2
Write instead:
  vmap(f, in_dims=(None, 0, None))  # if a and c are the same for all
  vmap(f, in_dims=(None, None, 0))  # if a and b are the same for all
""",
    ),
    "sizes of named arguments differ": (
        lambda: lw.vmap(loss, in_dims={"x": 0, "w": 0})(x, w=y),
        ValueError,
        """
vmap(loss, in_dims={'x': 0, 'w': 0})(x, w=w): Expected all tensors to have the same size in the mapped dimension, got sizes [3, 4] for the mapped dimension
  x: shape [3, 2], dim 0 of size 3
  w: shape [4, 2], dim 0 of size 4
Write instead:
  vmap(loss, in_dims={'x': 0})  # if w is the same for all
  vmap(loss, in_dims={'w': 0})  # if x is the same for all
""",
    ),
    "sizes differ inside a dict": (
        lambda: lw.vmap(model, in_dims=({"w": 1, "b": 0}, 0))({"w": x, "b": y}, y),
        ValueError,
        """
vmap(model, in_dims=({'w': 1, 'b': 0}, 0))(params, x): Expected all tensors to have the same size in the mapped dimension, got sizes [2, 4, 4] for the mapped dimension
  params['w']: shape [3, 2], dim 1 of size 2
  params['b']: shape [4, 2], dim 0 of size 4
  x: shape [4, 2], dim 0 of size 4
Write instead:
  vmap(model, in_dims=({'w': None, 'b': 0}, 0))  # if params['w'] is the same for all
""",
    ),
    "axis_size differs": (
        lambda: lw.vmap(loss, axis_size=5)(x, x),
        ValueError,
        """
vmap(loss, axis_size=5)(x, w): Expected all tensors to have the same size in the mapped dimension, got sizes [3, 3] for the mapped dimension
  axis_size=5
  x: shape [3, 2], dim 0 of size 3
  w: shape [3, 2], dim 0 of size 3
Write instead:
  vmap(loss, axis_size=3)  # or without axis_size, since there are mapped tensors
""",
    ),
    "axis_size is no number": (
        lambda: lw.vmap(loss, axis_size="a")(x, x),
        ValueError,
        """
vmap(loss, axis_size='a')(x, w): axis_size must be a number of lanes, got 'a'
Write instead:
  vmap(loss, axis_size=3)
""",
    ),
    "nothing is mapped": (
        lambda: lw.vmap(loss, in_dims=(None, None))(x, x),
        ValueError,
        """
vmap(loss, in_dims=(None, None))(x, w): Expected at least one Tensor to vmap over: no argument is mapped
Write instead:
  vmap(loss, in_dims=0)
  vmap(loss, in_dims=None, axis_size=3)  # three lanes, nothing mapped
""",
    ),
    "out_dims does not fit": (
        lambda: lw.vmap(lambda x: (x, x), out_dims=(0, 0, 0))(x),
        ValueError,
        """
vmap(f, ..., out_dims=(0, 0, 0)): out_dims is not compatible with the structure of `outputs`. out_dims has structure (0, 0, 0) but outputs has structure (*, *)
  out_dims is a tuple of 3, but stands for a tuple of 2
Write instead:
  vmap(f, out_dims=0)
""",
    ),
    "out_dims is a string": (
        lambda: lw.vmap(loss, out_dims="a")(x, x),
        ValueError,
        """
vmap(loss, out_dims='a')(x, w): `out_dims` must be an int, None or a python collection of ints representing where in the outputs the vmapped dimension should appear, but out_dims is 'a'
Write instead:
  vmap(loss, out_dims=0)
  vmap(loss, out_dims="list")    # a list, one result for each lane
  vmap(loss, out_dims="jagged")  # one nested tensor
""",
    ),
    "out_dims out of range": (
        lambda: lw.vmap(lambda x: {"y": x}, out_dims=2)(x),
        IndexError,
        """
vmap(f, ..., out_dims=2): Dimension out of range (expected to be in range of [-2, 1], but got 2): output['y'] [2] has 2 dims, its 3 lanes included
Write instead:
  vmap(f, out_dims=0)
""",
    ),
    "out_dims is None for lanes": (
        lambda: lw.vmap(torch.sin, out_dims=None)(x),
        ValueError,
        """
vmap(sin, ...): `sin` can not return a BatchedTensor when out_dim is None: output of shape [2] differs from lane to lane, so there is no one value to return
Write instead:
  vmap(sin, out_dims=0)
""",
    ),
    "lanes in an object": (
        lambda: lw.vmap(lambda x: (x, torch.distributions.Normal(x, 1.0, validate_args=False)))(x),
        ValueError,
        """
vmap(f, ...): `f` must only return Tensors, got type <class 'torch.distributions.normal.Normal'> for output[1], whose `.loc` has lanes. Did you mean to set out_dims= to None for output? vmap looks into tuples, lists, dicts, named tuples, dataclasses and classes registered with torch's pytree
Write instead:
  return y.loc  # the tensors themselves
""",
    ),
    "randomness": (
        lambda: lw.vmap(loss, randomness="some"),
        RuntimeError,
        """
Only allowed values for randomness are 'error', 'different', or 'same'. vmap got randomness='some'
Write instead:
  vmap(f, randomness="different")  # every lane draws its own numbers
""",
    ),
    "chunk_size": (
        lambda: lw.vmap(loss, chunk_size=0),
        ValueError,
        """
vmap: chunk_size should be None or greater than 0. (got 0)
Write instead:
  vmap(f, chunk_size=64)  # or chunk_size="auto"
""",
    ),
    "memory_budget": (
        lambda: lw.vmap(loss, memory_budget=100),
        ValueError,
        """
vmap: memory_budget is a number of bytes for chunk_size="auto", got memory_budget=100 with chunk_size=None
Write instead:
  vmap(f, chunk_size="auto", memory_budget=2 * 2**30)  # 2 GiB
""",
    ),
    "a nested tensor": (
        lambda: lw.vmap(lambda x: x, in_dims=1)(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])),
        RuntimeError,
        """
vmap(f, in_dims=1)(x): x is a nested tensor (Internal error: NestedTensorImpl doesn't support sizes): its components are lanes along dim 0, not along dim 1
Write instead:
  vmap(f, in_dims=0)(x)
""",
    ),
    "inside torch.func": (
        lambda: torch.func.vmap(lambda x: lw.vmap(torch.sin)(x))(x),
        RuntimeError,
        """
vmap: called inside a function that torch.func transforms. Its tensors belong to another engine, and the two cannot be nested in this order
Write instead:
  from lanewise import vmap, grad, jvp  # for the outer transform too
""",
    ),
}
GRAD = {
    "a module": (
        lambda: lw.grad(lambda module, x: module(x).sum())(nn.Linear(2, 1), x),
        ValueError,
        """
grad(f)(module, x): Thing passed to transform API must be Tensor, got <class 'torch.nn.modules.linear.Linear'> for module
Write instead:
  params = dict(module.named_parameters())
  functional_call(module, params, x)  # in f(params, x)
""",
    ),
    "an iterator over parameters": (
        lambda: lw.grad(lambda params, x: x.sum())(nn.Linear(2, 1).parameters(), x),
        ValueError,
        """
grad(f)(params, x): Thing passed to transform API must be Tensor, got <class 'generator'> for params
Write instead:
  params = dict(model.named_parameters())  # a structure of tensors, not an iterator
""",
    ),
    "inside torch.func": (
        lambda: torch.func.vmap(lw.grad(lambda x: x.sin().sum()))(x),
        RuntimeError,
        """
grad: called inside a function that torch.func transforms. Its tensors belong to another engine, and the two cannot be nested in this order
Write instead:
  from lanewise import vmap, grad, jvp  # for the outer transform too
""",
    ),
    "not a scalar": (
        lambda: lw.grad(lambda x: x * 2)(x),
        RuntimeError,
        """
grad(f)(x): Expected f to return a scalar Tensor, got tensor with 2 dims [3, 2]. Maybe you wanted to use the vjp or jacrev APIs instead?
Write instead:
  return loss.sum()  # or: jacrev(f)(x)
""",
    ),
    "not a tensor": (
        lambda: lw.grad(lambda x: 1.0)(x),
        RuntimeError,
        """
grad(f)(x): Expected f to return a Tensor, got type <class 'float'>
Write instead:
  return loss  # a 0-dim tensor
""",
    ),
    "complex": (
        lambda: lw.grad(lambda z: z.sum())(x + 1j),
        RuntimeError,
        """
grad(f)(z): grad can be implicitly created only for real scalar outputs but got torch.complex64
Write instead:
  return loss.abs()  # or loss.real; or: jacrev(f)(z), the complex derivative
""",
    ),
    "no aux": (
        lambda: lw.grad(loss, has_aux=True)(x, x),
        RuntimeError,
        """
grad(loss)(x, w): output of function f should be a tuple: (output, aux) if has_aux is True, got <class 'torch.Tensor'>
Write instead:
  return loss, aux
""",
    ),
    "aux is a triple": (
        lambda: lw.grad(lambda x: (x.sum(), 1, 2), has_aux=True)(x),
        RuntimeError,
        """
grad(f)(x): output of function f should be a tuple: (output, aux) if has_aux is True, got a tuple of 3
Write instead:
  return loss, aux
""",
    ),
    "a Python number": (
        lambda: lw.grad(lambda x: x)(2.0),
        ValueError,
        """
grad(f)(x): Thing passed to transform API must be Tensor, got <class 'float'> for x
Write instead:
  x = torch.tensor(2.0)
""",
    ),
    "a string in a dict": (
        lambda: lw.grad(lambda params: params["w"].sum())({"w": x, "name": "net"}),
        ValueError,
        """
grad(f)(params): Thing passed to transform API must be Tensor, got <class 'str'> for params['name']
Write instead:
  close over it in f
""",
    ),
    "integers": (
        lambda: lw.grad(loss, argnums=1)(x, numbers),
        RuntimeError,
        """
grad(loss, argnums=1)(x, w): only Tensors of floating point dtype can require gradients, got torch.int64 for w [3]
Write instead:
  w.float()  # or leave the argument out of argnums
""",
    ),
    "argnums is a string": (
        lambda: lw.grad(loss, argnums="x")(x, x),
        RuntimeError,
        """
grad(loss, argnums='x')(x, w): argnums must be int or Tuple[int, ...], got: <class 'str'>
Write instead:
  grad(loss, argnums=(0, 1))(x, w)
""",
    ),
    "argnums holds a string": (
        lambda: lw.grad(loss, argnums=("x",))(x, x),
        RuntimeError,
        """
grad(loss, argnums=('x',))(x, w): argnums must be int or Tuple[int, ...], got: ('x',)
Write instead:
  grad(loss, argnums=(0, 1))(x, w)
""",
    ),
    "argnums is empty": (
        lambda: lw.grad(loss, argnums=())(x, x),
        RuntimeError,
        """
grad(loss, argnums=())(x, w): argnums must be non-empty, got: ()
Write instead:
  grad(loss, argnums=(0, 1))(x, w)
""",
    ),
    "argnums repeats": (
        lambda: lw.grad(loss, argnums=(0, -2))(x, x),
        RuntimeError,
        """
grad(loss, argnums=(0, -2))(x, w): argnums elements must be unique, got: (0, -2)
Write instead:
  grad(loss, argnums=(0, 1))(x, w)
""",
    ),
    "argnums out of range": (
        lambda: lw.grad(loss, argnums=2)(x, w=x),
        RuntimeError,
        """
grad(loss, argnums=2)(x, w=w): Got argnum=2, but only 1 positional inputs: positions go from -1 to 0. An argument passed by keyword cannot be differentiated
Write instead:
  grad(loss)(x, w=w)
""",
    ),
    "grad_and_value names itself": (
        lambda: lw.grad_and_value(loss, argnums=3)(x, x),
        RuntimeError,
        """
grad_and_value(loss, argnums=3)(x, w): Got argnum=3, but only 2 positional inputs: positions go from -2 to 1. An argument passed by keyword cannot be differentiated
Write instead:
  grad_and_value(loss, argnums=(0, 1))(x, w)
""",
    ),
    "value_and_grad names itself": (
        lambda: lw.value_and_grad(lambda x: x)(x),
        RuntimeError,
        """
value_and_grad(f)(x): Expected f to return a scalar Tensor, got tensor with 2 dims [3, 2]. Maybe you wanted to use the vjp or jacrev APIs instead?
Write instead:
  return loss.sum()  # or: jacrev(f)(x)
""",
    ),
}
VJP = {
    "inside torch.func": (
        lambda: torch.func.vmap(lambda x: lw.vjp(torch.sin, x)[1](x))(x),
        RuntimeError,
        """
vjp: called inside a function that torch.func transforms. Its tensors belong to another engine, and the two cannot be nested in this order
Write instead:
  from lanewise import vmap, grad, jvp  # for the outer transform too
""",
    ),
    "cotangents of another structure": (
        lambda: lw.vjp(lambda x: (x, x), x)[1](x),
        RuntimeError,
        """
vjp_fn(cotangents): Expected pytree structure of cotangents to be the same as pytree structure of outputs to the function. cotangents: *, primal output: (*, *)
Write instead:
  vjp_fn((ct0, ct1))  # one argument, with the structure of what f returns
""",
    ),
    "a cotangent of another shape": (
        lambda: lw.vjp(lambda x: x * 2, x)[1](torch.ones(2)),
        RuntimeError,
        """
vjp_fn(cotangents): Mismatch in shape: grad_output[0] has a shape of [2] and output has a shape of [3, 2]
Write instead:
  vjp_fn(torch.ones([3, 2]))
""",
    ),
    "a cotangent that is no tensor": (
        lambda: lw.vjp(lambda x: (x, x), x)[1]((x, 2.0)),
        RuntimeError,
        """
vjp_fn(cotangents): Mismatch in shape: grad_output[1] is a <class 'float'> and output[1] has a shape of [3, 2]
""",
    ),
    "no outputs": (
        lambda: lw.vjp(lambda x: (), x),
        RuntimeError,
        """
vjp(f, x): Expected f to be a function that has non-empty output (got output = ())
Write instead:
  return y  # at least one tensor
""",
    ),
    "an output that is no tensor": (
        lambda: lw.vjp(lambda x: (x, 2), x),
        RuntimeError,
        """
vjp(f, x): expected f(*primals) to return only tensors, got unsupported type <class 'int'> for output[1]
Write instead:
  return y, note  # other values as aux, with has_aux=True
""",
    ),
    "an integer output": (
        lambda: lw.vjp(lambda x: {"y": x, "n": x.argmax()}, x),
        RuntimeError,
        """
vjp(f, x): All outputs of f must be floating-point or complex Tensors, got torch.int64 for output['n'] []
Write instead:
  return y, count  # integer results as aux, with has_aux=True
""",
    ),
    "an integer input": (
        lambda: lw.vjp(loss, x, numbers),
        RuntimeError,
        """
vjp(loss, x, w): only Tensors of floating point dtype can require gradients, got torch.int64 for w [3]
Write instead:
  w.float()  # or leave the argument out of argnums
""",
    ),
    "an input that is no tensor": (
        lambda: lw.vjp(loss, x, 2.0),
        ValueError,
        """
vjp(loss, x, w): Thing passed to transform API must be Tensor, got <class 'float'> for w
Write instead:
  w = torch.tensor(2.0)
""",
    ),
    "no aux": (
        lambda: lw.vjp(loss, x, x, has_aux=True),
        RuntimeError,
        """
vjp(loss, x, w): output of function f should be a tuple: (output, aux) if has_aux is True, got <class 'torch.Tensor'>
Write instead:
  return loss, aux
""",
    ),
}
JACOBIAN = {
    "jacfwd: a number is returned": (
        lambda: lw.jacfwd(lambda x: x.sum().item())(x[0]),
        RuntimeError,
        """
jacfwd(f)(x): expected f(*primals) to return only tensors, got unsupported type <class 'float'> for output
Write instead:
  return y, note  # other values as aux, with has_aux=True
""",
    ),
    "jacfwd: no aux": (
        lambda: lw.jacfwd(torch.sin, has_aux=True, chunk_size=1)(x[0]),
        RuntimeError,
        """
jacfwd(sin)(args[0]): output of function f should be a tuple: (output, aux) if has_aux is True, got <class 'torch.Tensor'>
Write instead:
  return loss, aux
""",
    ),
    "jacrev: chunk_size": (
        lambda: lw.jacrev(torch.sin, chunk_size=0),
        ValueError,
        """
jacrev: `chunk_size` should be greater than 0. (got 0)
Write instead:
  jacrev(f, chunk_size=64)  # or chunk_size="auto"
""",
    ),
    "jacfwd: chunk_size": (
        lambda: lw.jacfwd(torch.sin, chunk_size=-1),
        ValueError,
        """
jacfwd: chunk_size should be None or greater than 0. (got -1)
Write instead:
  jacfwd(f, chunk_size=64)  # or chunk_size="auto"
""",
    ),
    "jacrev: integers": (
        lambda: lw.jacrev(loss, argnums=1)(x, numbers),
        RuntimeError,
        """
jacrev(loss, argnums=1)(x, w): only Tensors of floating point dtype can require gradients, got torch.int64 for w [3]
Write instead:
  w.float()  # or leave the argument out of argnums
""",
    ),
    "jacfwd: integers": (
        lambda: lw.jacfwd(loss, argnums=(0, 1))(x, numbers),
        ValueError,
        """
jacfwd(loss, argnums=(0, 1))(x, w): Expected primal to be floating point or complex, but got: torch.int64 for w [3]
Write instead:
  w.float()  # or leave the argument out of argnums
""",
    ),
    "jacrev: integer output": (
        lambda: lw.jacrev(lambda x: (x, x.argmax()))(x),
        RuntimeError,
        """
jacrev(f)(x): All outputs of f must be floating-point or complex Tensors, got torch.int64 for output[1] []
Write instead:
  return y, count  # integer results as aux, with has_aux=True
""",
    ),
    "jacrev: an output that is no tensor": (
        lambda: lw.jacrev(lambda x: (x, "ok"))(x),
        RuntimeError,
        """
jacrev(f)(x): expected f(*primals) to return only tensors, got unsupported type <class 'str'> for output[1]
Write instead:
  return y, note  # other values as aux, with has_aux=True
""",
    ),
    "jacrev: argnums": (
        lambda: lw.jacrev(loss, argnums=2)(x, x),
        RuntimeError,
        """
jacrev(loss, argnums=2)(x, w): Got argnum=2, but only 2 positional inputs: positions go from -2 to 1. An argument passed by keyword cannot be differentiated
Write instead:
  jacrev(loss, argnums=(0, 1))(x, w)
""",
    ),
    "jacfwd: randomness": (
        lambda: lw.jacfwd(loss, randomness="some"),
        RuntimeError,
        """
Only allowed values for randomness are 'error', 'different', or 'same'. jacfwd got randomness='some'
Write instead:
  jacfwd(f, randomness="different")  # every lane draws its own numbers
""",
    ),
    "jacfwd: not holomorphic": (
        lambda: lw.jacfwd(lambda z: z.conj())(torch.ones(2) + 0j),
        RuntimeError,
        """
jacfwd(f)(z): the function is complex but not holomorphic: its derivative depends on the direction in the complex plane, so there is no complex Jacobian (a conjugate, abs, real or imag does this)
Write instead:
  g = lambda x: torch.view_as_real(f(torch.view_as_complex(x)))
  jacfwd(g)(torch.view_as_real(z))  # the real Jacobian, [..., 2] out and in
""",
    ),
    "jacrev: not holomorphic": (
        lambda: lw.jacrev(lambda z: z.conj())(torch.ones(2) + 0j),
        RuntimeError,
        """
jacrev(f)(z): the function is complex but not holomorphic: its derivative depends on the direction in the complex plane, so there is no complex Jacobian (a conjugate, abs, real or imag does this)
Write instead:
  g = lambda x: torch.view_as_real(f(torch.view_as_complex(x)))
  jacrev(g)(torch.view_as_real(z))  # the real Jacobian, [..., 2] out and in
""",
    ),
    "jacrev inside torch.func": (
        lambda: torch.func.vmap(lambda x: lw.jacrev(torch.sin)(x))(x),
        RuntimeError,
        """
jacrev: called inside a function that torch.func transforms. Its tensors belong to another engine, and the two cannot be nested in this order
Write instead:
  from lanewise import vmap, grad, jvp  # for the outer transform too
""",
    ),
}

MODULES = {
    "functional_call: a module in place of its state": (
        lambda: lw.functional_call(nn.Linear(2, 2), nn.Linear(2, 2), (x,)),
        ValueError,
        """
functional_call: Expected parameter_and_buffer_dicts to be a dict, or a list/tuple of dicts, but got <class 'torch.nn.modules.linear.Linear'>
Write instead:
  functional_call(module, dict(module.named_parameters()), args)
""",
    ),
    "functional_call: tensors in place of dicts": (
        lambda: lw.functional_call(nn.Linear(2, 2), [x], (x,)),
        ValueError,
        """
functional_call: Expected all elements of parameter_and_buffer_dicts to be dictionaries, but element 0 is a Tensor
Write instead:
  functional_call(module, (params, buffers), args)  # dicts by name
""",
    ),
    "functional_call: other names": (
        lambda: lw.functional_call(nn.Linear(2, 2), {"w": x}, (x,), strict=True),
        RuntimeError,
        """
functional_call: Error(s) in reparametrizing for Linear:
\tUnexpected key(s): 'w'.
\tMissing key(s): 'bias', 'weight'.
Write instead:
  params = dict(module.named_parameters())  # and buffers: dict(module.named_buffers())
""",
    ),
    "stack_module_state: no models": (
        lambda: lw.stack_module_state([]),
        RuntimeError,
        """
stack_module_state: Expected at least one model, got 0.
Write instead:
  stack_module_state([model_0, model_1])
""",
    ),
    "stack_module_state: classes": (
        lambda: lw.stack_module_state([nn.Linear(2, 2), nn.ReLU()]),
        RuntimeError,
        """
stack_module_state: Expected all models to be of the same class, but models[0] is a Linear and models[1] a ReLU
Write instead:
  models = [Net() for _ in range(5)]  # of one class and one size
""",
    ),
    "stack_module_state: modes": (
        lambda: lw.stack_module_state([nn.Linear(2, 2), nn.Linear(2, 2).eval()]),
        RuntimeError,
        """
stack_module_state: Expected all models to have the same training/eval mode, but the model is in eval mode in models[1] and not in models[0]
Write instead:
  for model in models: model.train()  # or model.eval()
""",
    ),
}
DERIVATIVES = {
    "grad: keywords only": (
        lambda: lw.grad(loss)(x=x, w=x),
        RuntimeError,
        """
grad(loss)(x=x, w=w): Got argnum=0, but only 0 positional inputs. An argument passed by keyword cannot be differentiated
Write instead:
  grad(loss)(x, w)
""",
    ),
    "grad: an array of NumPy": (
        lambda: lw.grad(lambda x: x.sum())(x.numpy()),
        ValueError,
        """
grad(f)(x): Thing passed to transform API must be Tensor, got <class 'numpy.ndarray'> for x
Write instead:
  x = torch.as_tensor(x)
""",
    ),
    "vjp: two cotangents": (
        lambda: lw.vjp(lambda x: {"y": x}, x)[1](x, x),
        RuntimeError,
        """
vjp_fn(cotangents, retain_graph=True, create_graph=None): Expected pytree structure of cotangents to be the same as pytree structure of outputs to the function, as one argument: got a tensor as retain_graph. Primal output: {'y': *}
Write instead:
  vjp_fn({'y': ct})  # one argument, with the structure of what f returns
""",
    ),
    "linearize: a tangent of another shape": (
        lambda: lw.linearize(torch.sin, x)[1](x[0]),
        RuntimeError,
        """
tangent:0 with shape torch.Size([2]) in flattened pytree doesn't match the shape torch.Size([3, 2]) of the corresponding primal.
Write instead:
  torch.ones([3, 2], dtype=torch.float32, device='cpu')  # for one
""",
    ),
    "linearize: other arguments": (
        lambda: lw.linearize(loss, x, x)[1](x),
        RuntimeError,
        """
Expected the tangents (*,) to have the same argspec as the primals (*, *)
Write instead:
  jvp_fn(t0, t1)  # a tangent for each primal
""",
    ),
    "jacfwd: random numbers": (
        lambda: lw.jacfwd(lambda x: x * torch.rand(2))(x[0]),
        RuntimeError,
        """
jacfwd: called random operation while in randomness error mode: aten::rand
Write instead:
  jacfwd(f, randomness="different")  # every direction draws its own numbers
  jacfwd(f, randomness="same")       # all directions draw the same numbers
""",
    ),
}


def loss_and_aux(x):
    return (x * x).sum(), x


def loss_and_more(x):
    return (x * x).sum(), x, 3


def forgotten(x):
    _ = x * 2


HINTS = {
    "grad: aux": (
        lambda: lw.grad(loss_and_aux)(x),
        RuntimeError,
        """
grad(loss_and_aux)(x): Expected f to return a Tensor, got type <class 'tuple'>
Write instead:
  grad(loss_and_aux, has_aux=True)(x)  # f returns (loss, aux)
  return loss  # a 0-dim tensor
""",
    ),
    "value_and_grad: more aux": (
        lambda: lw.value_and_grad(loss_and_more, argnums=(0,))(x),
        RuntimeError,
        """
value_and_grad(loss_and_more, argnums=(0,))(x): Expected f to return a Tensor, got type <class 'tuple'>
Write instead:
  value_and_grad(loss_and_more, argnums=(0,), has_aux=True)(x)  # f returns (loss, aux), aux a tuple of the others
  return loss  # a 0-dim tensor
""",
    ),
    "grad: no return": (
        lambda: lw.grad(forgotten)(x),
        RuntimeError,
        """
grad(forgotten)(x): Expected f to return a Tensor, got type <class 'NoneType'>
Write instead:
  return loss  # a 0-dim tensor
""",
    ),
    **{
        f"{api}: no return": (
            call,
            RuntimeError,
            f"""
{text}: expected f(*primals) to return only tensors, got unsupported type <class 'NoneType'> for output
Write instead:
  return y
""",
        )
        for api, text, call in (
            ("jacrev", "jacrev(forgotten)(x)", lambda: lw.jacrev(forgotten)(x)),
            ("jacfwd", "jacfwd(forgotten)(x)", lambda: lw.jacfwd(forgotten)(x)),
            ("hessian", "hessian(forgotten)(x)", lambda: lw.hessian(forgotten)(x)),
            ("vjp", "vjp(forgotten, x)", lambda: lw.vjp(forgotten, x)),
            ("jvp", "jvp(forgotten, primals, tangents)", lambda: lw.jvp(forgotten, (x,), (x,))),
            ("linearize", "linearize(forgotten, *primals)", lambda: lw.linearize(forgotten, x)),
        )
    },
    "jacrev: None among others": (
        lambda: lw.jacrev(lambda x: (x, None))(x),
        RuntimeError,
        """
jacrev(f)(x): expected f(*primals) to return only tensors, got unsupported type <class 'NoneType'> for output[1]
Write instead:
  return y, note  # other values as aux, with has_aux=True
""",
    ),
    "hessian: argnums": (
        lambda: lw.hessian(loss, argnums=3)(x, x),
        RuntimeError,
        """
hessian(loss, argnums=3)(x, w): Got argnum=3, but only 2 positional inputs: positions go from -2 to 1. An argument passed by keyword cannot be differentiated
Write instead:
  hessian(loss, argnums=(0, 1))(x, w)
""",
    ),
    "hessian: integers": (
        lambda: lw.hessian(torch.sum)(numbers),
        RuntimeError,
        """
hessian(sum)(args[0]): only Tensors of floating point dtype can require gradients, got torch.int64 for args[0] [3]
Write instead:
  args[0].float()  # or leave the argument out of argnums
""",
    ),
    "vmap of a hessian": (
        lambda: lw.vmap(lw.hessian(loss), in_dims=[0, 0])(x, x),
        ValueError,
        """
vmap(hessian(loss), in_dims=[0, 0])(x, w): expected `in_dims` to be int or a (potentially nested) tuple matching the structure of inputs, or a dict of argument names, got: <class 'list'>
Write instead:
  vmap(hessian(loss), in_dims=(0, 0))
""",
    ),
    "jvp: zero for a tangent": (
        lambda: lw.jvp(torch.mul, (x, x), (x, 0.0)),
        RuntimeError,
        """
jvp(mul, primals, tangents): Expected tangents to only contain Tensors, got <class 'float'> for tangents[1]
Write instead:
  torch.zeros_like(primals[1])
""",
    ),
    "jvp: a number for a tangent": (
        lambda: lw.jvp(model, ({"w": x}, x), ({"w": 2}, x)),
        RuntimeError,
        """
jvp(model, primals, tangents): Expected tangents to only contain Tensors, got <class 'int'> for tangents[0]['w']
Write instead:
  torch.full_like(primals[0]['w'], 2)
""",
    ),
    "jvp: None for a tangent": (
        lambda: lw.jvp(torch.mul, (x, x), (x, None)),
        RuntimeError,
        """
jvp(mul, primals, tangents): Expected tangents to only contain Tensors, got <class 'NoneType'> for tangents[1]
Write instead:
  torch.zeros_like(primals[1])
""",
    ),
    "jvp: a number for a primal": (
        lambda: lw.jvp(torch.mul, (x, 2.0), (x, x)),
        RuntimeError,
        """
jvp(mul, primals, tangents): Expected primals to only contain Tensors, got <class 'float'> for primals[1]
Write instead:
  torch.tensor(2.0)
""",
    ),
    "linearize: zero for a tangent": (
        lambda: lw.linearize(torch.mul, x, x)[1](x, 0.0),
        RuntimeError,
        """
linearize: Expected tangents to only contain Tensors, got <class 'float'> for tangent:1 in flattened pytree
Write instead:
  torch.zeros_like(x)  # x [3, 2] is its primal
""",
    ),
    "out_dims: a text": (
        lambda: lw.vmap(loss, out_dims=(0, "lists"))(x, x),
        ValueError,
        """
vmap(loss, out_dims=(0, 'lists'))(x, w): `out_dims` must be an int, None or a python collection of ints representing where in the outputs the vmapped dimension should appear, but out_dims[1] is 'lists'
Write instead:
  vmap(loss, out_dims=0)
  vmap(loss, out_dims="list")    # a list, one result for each lane
  vmap(loss, out_dims="jagged")  # one nested tensor
""",
    ),
    "out_dims: a large int": (
        lambda: lw.vmap(lambda x: 10**30 + int(x.sum()))(x),
        RuntimeError,
        """
vmap: output: 1000000000000000000000000000002 does not fit into a tensor: Overflow when unpacking long long: the ints of lanes become one of int64
Write instead:
  vmap(f, out_dims="list")(xs)  # a list of Python's own ints, one for each lane
  return float(n)  # rounded
""",
    ),
    "out_dims: a very large int": (
        lambda: lw.vmap(lambda x: 2**500 * int(x.sum()))(x * numbers[1:]),
        RuntimeError,
        """
vmap: output: an int of 502 bits does not fit into a tensor: Overflow when unpacking long long: the ints of lanes become one of int64
Write instead:
  vmap(f, out_dims="list")(xs)  # a list of Python's own ints, one for each lane
  return float(n)  # rounded
""",
    ),
    "key: a tensor": (
        lambda: lw.vmap(lambda i: lw.random.key(i))(numbers),
        ValueError,
        """
key: seed is a whole number of 64 bits, got a tensor [] of torch.int64
Write instead:
  fold_in(key(0), i)  # i may be a tensor, and one of each lane
""",
    ),
}

GROUPS = {
    "hints": HINTS,
    "modules": MODULES,
    "derivatives": DERIVATIVES,
    "vmap": VMAP,
    "grad": GRAD,
    "vjp": VJP,
    "jacobian": JACOBIAN,
}
ALL = {f"{group}: {name}": row for group, rows in GROUPS.items() for name, row in rows.items()}


def raised(call) -> Exception:
    with pytest.raises(errors.LanewiseError) as caught:
        call()
    return caught.value


def without_line(message: str) -> str:
    return re.sub(r"\n  at [^\n]*", "", message)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ALL)
def test_message(name):
    call, kind, text = ALL[name]
    error = raised(call)
    assert isinstance(error, kind)
    assert without_line(str(error)) == text.strip("\n")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", ALL)
def test_the_users_line_is_shown(name):
    call, _, _ = ALL[name]
    number = call.__code__.co_firstlineno
    (shown,) = re.findall(r"\n  at ([^\n]*)", str(raised(call)))
    assert shown == f"{__file__}:{number}: {linecache.getline(__file__, number).strip()}"


# --- the same type and phrase as torch's, where the text is tested beside the code that raises it ---------------------

net = nn.Linear(2, 2)
other = nn.Sequential(nn.Linear(2, 2))
weights = dict(net.named_parameters())

PHRASES = {
    "range": (
        lambda: lw.vmap(lambda n: torch.ones(3)[:n])(numbers),
        r"output: lanes return tensors of different shapes.*: lane 0 gives \[0\], lane 1 gives \[1\]",
    ),
    "a mask": (
        lambda: lw.vmap(lambda x: x[x > 0])(signs),
        r"output: lanes return tensors of different shapes.*: lane 0 gives \[1\], lane 1 gives \[2\]",
    ),
    "nonzero": (lambda: lw.vmap(torch.nonzero)(signs - 1), "batching operators that can output dynamic shape"),
    "random": (
        lambda: lw.vmap(lambda x: x + torch.rand(2))(x),
        "called random operation while in randomness error mode",
    ),
    "random in jacfwd": (
        lambda: lw.jacfwd(lambda x: x + torch.rand(2))(x[0]),
        "called random operation while in randomness error mode",
    ),
    "random in place": (
        lambda: lw.vmap(lambda x: y.normal_() * x[0], randomness="different")(x),
        "Cannot ask for different inplace randomness on an unbatched tensor",
    ),
    "captured": (
        lambda: lw.vmap(lambda x: torch.add(y[0], 1, out=y[0]).add_(x))(x),
        r"inplace arithmetic\(self, \*extra_args\) is not possible because there exists a Tensor `other`",
    ),
    "memory": (
        lambda: lw.vmap(lambda x: x.data_ptr())(steps),
        "Cannot access data pointer of Tensor that doesn't have storage",
    ),
    "jvp: inside torch.func": (
        lambda: torch.func.vmap(lambda x: lw.jvp(torch.sin, (x,), (x,)))(x),
        "called inside a function that torch.func transforms",
    ),
    "jvp: primals": (
        lambda: lw.jvp(torch.sin, x, x),
        "Expected primals to be a tuple. E.g. it should be valid to call f",
    ),
    "jvp: structure": (
        lambda: lw.jvp(torch.sin, (x,), (x, x)),
        "Expected primals and tangents to have the same python structure",
    ),
    "jvp: numbers": (lambda: lw.jvp(torch.sin, (1.0,), (1.0,)), "Expected primals to only contain Tensors"),
    "jvp: shape": (
        lambda: lw.jvp(torch.sin, (x,), (torch.ones(2),)),
        "Trying to set a forward gradient that has a different size",
    ),
    "jvp: strict": (
        lambda: lw.jvp(lambda x: torch.ones(2), (x,), (x,), strict=True),
        "The output of f is independent of the inputs",
    ),
    "jvp: nothing": (lambda: lw.jvp(lambda x: (), (x,), (x,)), "Expected f to be a function that has non-empty output"),
    "jvp: output": (lambda: lw.jvp(lambda x: 3, (x,), (x,)), r"expected f\(\*primals\) to return only tensors"),
    "jvp: aux": (
        lambda: lw.jvp(torch.sin, (x,), (x,), has_aux=True),
        r"output of function f should be a tuple: \(output, aux\) if has_aux is True",
    ),
    "functional_call: not dicts": (
        lambda: lw.functional_call(net, 3, x),
        "Expected parameter_and_buffer_dicts to be a dict",
    ),
    "functional_call: twice": (
        lambda: lw.functional_call(net, (weights, weights), x),
        "appeared in multiple dictionaries; behavior of functional call is ambiguous",
    ),
    "functional_call: unknown": (
        lambda: lw.functional_call(net, {**weights, "z": x}, x, strict=True),
        "Error.s. in reparametrizing for(.|\n)*Unexpected key",
    ),
    "functional_call: missing": (
        lambda: lw.functional_call(net, {}, x, strict=True),
        "Error.s. in reparametrizing for(.|\n)*Missing key",
    ),
    "stack_module_state: none": (lambda: lw.stack_module_state([]), "Expected at least one model, got 0"),
    "stack_module_state: modes": (
        lambda: lw.stack_module_state([nn.Linear(2, 2), nn.Linear(2, 2).eval()]),
        "the same training/eval mode",
    ),
    "stack_module_state: classes": (lambda: lw.stack_module_state([net, other]), "of the same class"),
    "stack_module_state: shapes": (
        lambda: lw.stack_module_state([net, nn.Linear(3, 2)]),
        "each tensor to be equal size",
    ),
    "stack_module_state: requires_grad": (
        lambda: lw.stack_module_state([net, nn.Linear(2, 2).requires_grad_(False)]),
        "to have the same .requires_grad",
    ),
    "functionalize": (
        lambda: lw.functionalize(torch.sin, remove="all"),
        "functionalize.f, remove='mutations'.: received invalid argument for remove=",
    ),
    "rearrange: dims": (lambda: lw.rearrange(x, "a -> a"), "[Nn]umber of dimensions in pattern"),
    "rearrange: names": (lambda: lw.rearrange(x, "a b -> a"), "Identifiers only on one side of rearrange expression"),
}
VALUE_ERRORS = {"functional_call: not dicts", "functional_call: twice", "rearrange: dims", "rearrange: names"}


@pytest.mark.parametrize("name", PHRASES)
def test_phrase(name):
    call, phrase = PHRASES[name]
    with pytest.raises(ValueError if name in VALUE_ERRORS else RuntimeError, match=phrase) as caught:
        call()
    assert isinstance(caught.value, errors.LanewiseError)


@pytest.mark.parametrize(
    "api, instead",
    [
        *[(name, f"{name}(f)(x)") for name in ("vmap", "grad", "grad_and_value", "value_and_grad", "jacrev")],
        *[(name, f"{name}(f)(x)") for name in ("jacfwd", "hessian", "functionalize")],
        ("vjp", "vjp(f, x)"),
        ("linearize", "linearize(f, x)"),
        ("jvp", "jvp(f, (x,), (t,))"),
    ],
)
def test_something_else_than_a_function(api, instead):
    arguments = {"jvp": ((x,), (x,)), "vjp": (x,), "linearize": (x,)}.get(api, ())
    with pytest.raises(TypeError) as caught:
        getattr(lw, api)(x.sum(), *arguments)
    text = f"{api}: expected a function as the first argument, got <class 'torch.Tensor'>\nWrite instead:\n  {instead}"
    assert without_line(str(caught.value)) == text


@pytest.mark.skipif(sys.version_info < (3, 11), reason="errors have no notes")
@pytest.mark.parametrize(
    "layer, example",
    [(nn.BatchNorm1d(3), (3,)), (nn.BatchNorm2d(3), (3, 5, 5)), (nn.BatchNorm3d(3), (3, 2, 2, 2))],
)
def test_a_layer_that_takes_a_batch(layer, example):
    batch = torch.randn(4, *example)
    note = "lanewise: inside vmap, an example has no batch dim\nWrite instead:\n  layer(x[None])[0]"
    for call in (
        lambda: lw.vmap(layer)(batch),
        lambda: lw.vmap(lw.vmap(layer))(batch[None]),
        lambda: lw.grad(lambda batch: lw.vmap(lw.grad(lambda x: layer(x).sum()))(batch).sum())(batch),
    ):
        with pytest.raises(ValueError, match=r"expected .*D input .got .D input.") as caught:
            call()
        assert caught.value.__notes__ == [note]
    layer.eval()
    lw.vmap(lambda x: layer(x[None])[0])(batch)
    with pytest.raises(ValueError, match="D input") as caught:
        lw.vmap(layer)(torch.randn(2, 2, 2, 2, 2, 2, 2, 2))
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("text", [x, 3])
def test_debug_print_of_no_text(text):
    calls = [lambda: lw.debug.print(text), lambda: lw.vmap(lambda x: lw.debug.print(text))(x)]
    calls.append(lambda: lw.vmap(lambda x: lw.debug.print(x if isinstance(text, torch.Tensor) else text))(x))
    for call in calls:
        with pytest.raises(TypeError) as caught:
            call()
        assert without_line(str(caught.value)) == (
            f"debug.print: the first argument is a format string, as for str.format, got {type(text)}\n"
            'Write instead:\n  debug.print("x = {}", x)'
        )


def test_jvp_of_integers():
    with pytest.raises(ValueError, match="Expected primal to be floating point or complex, but got: torch.int64"):
        lw.jvp(torch.sin, (numbers,), (numbers,))


# torch says that once in a process, of what a case makes.
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("name", [name for name in ALL if "torch.func" not in name and "axis_size" not in name])
def test_torch_raises_the_same_type_for_the_same_mistake(name, monkeypatch):
    """Where torch accepts what we refuse, or has no such option, there is nothing to compare."""
    call, kind, _ = ALL[name]
    for api in ("vmap", "grad", "grad_and_value", "vjp", "jacrev", "jacfwd"):
        monkeypatch.setattr(lw, api, getattr(torch.func, api))
    monkeypatch.delattr(lw, "value_and_grad")
    try:
        call()
    except (TypeError, AttributeError, AssertionError):
        pass
    except Exception as error:
        assert isinstance(error, kind), (error, kind)


# --- a slow path -----------------------------------------------------------------------------------------------------


def test_a_slow_path_warns_once_at_the_users_line(monkeypatch):
    monkeypatch.setattr(missing, "_warned", set())
    level = lw._core.batch.BatchLevel(3)
    op = torch.ops.aten.sin.default
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        lines = [inspect_line(), missing.warn_lane_loop(level, op)]
        missing.warn_lane_loop(level, op)
    (warning,) = caught
    assert warning.category is errors.SlowPathWarning and issubclass(warning.category, UserWarning)
    assert (warning.filename, warning.lineno) == (__file__, lines[0])
    assert str(warning.message) == (
        "vmap: There is a performance drop because we have not yet implemented the batching rule for aten.sin.default: "
        "it runs once per lane (3 calls, about 4 us each more than one batched call)"
    )


def inspect_line() -> int:
    """The line of the caller."""
    return sys._getframe(1).f_lineno
