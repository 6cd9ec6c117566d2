"""Random programs of elementwise operations whose lanes all go one way."""

import linecache
import random
from collections.abc import Callable
from typing import Any

import torch

_PRELUDE = """
import math
import torch
import torch.nn.functional as F
from torch import cos, tanh

SCALE = 0.75
WEIGHTS = torch.tensor([0.5, -1.25, 2.0], dtype=DTYPE)
MATRIX = torch.tensor([[0.5, -1.0, 0.25], [1.0, 0.75, -0.5], [-0.25, 0.5, 1.0]], dtype=DTYPE)
FACTOR = torch.tensor(1.5, dtype=DTYPE)

def squashed(v, rate=0.5):
    return torch.tanh(v * rate)

def turned(v):
    a, b, c = v
    return torch.stack([b, -c, a * 0.5])

def applied(function, v):
    return function(v) + 1
"""


class Writer:
    """Writes `f(x, y, a)` of two vectors [3] and a number of each lane; numbers and vectors of it are told apart."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.numbers = ["a"]
        self.vectors = ["x", "y"]
        self.lines: list[str] = []

    def pick(self, *choices: Any) -> Any:
        return self.random.choice(choices)

    def constant(self) -> str:
        return self.pick("2", "0.5", "-1.25", "SCALE", "math.pi", "FACTOR", "(1 - SCALE)")

    def number(self, depth: int = 2) -> str:
        if not depth:
            return self.pick(*self.numbers)
        n, v = (lambda: self.number(depth - 1)), (lambda: self.vector(depth - 1))
        return self.pick(
            *self.numbers,
            f"({n()} {self.pick('+', '-', '*')} {n()})",
            f"({n()} {self.pick('+', '-', '*', '/')} {self.constant()})",
            f"({self.constant()} - {n()})",
            f"{v()}[{self.pick(0, 1, 2, -1)}]",
            f"{v()}.sum()",
            f"torch.mean({v()})",
            f"{v()}.mean(dim=-1)",
            f"torch.sum({v()}, {self.pick('0', 'dim=0')})",
            f"torch.linalg.norm({v()})",
            f"({v()} @ {v()})",
            f"torch.dot({v()}, {v()})",
            f"squashed({n()})",
            f"applied(torch.sin, {n()})",
            f"applied(cos, {n()})",
            f"({n()} * {n()} + 1).sqrt()",
            f"torch.where({n()} > 0, {n()}, {n()} * 0.5)",
        )

    def vector(self, depth: int = 2) -> str:
        if not depth:
            return self.pick(*self.vectors, "WEIGHTS")
        n, v = (lambda: self.number(depth - 1)), (lambda: self.vector(depth - 1))
        return self.pick(
            *self.vectors,
            f"({v()} {self.pick('+', '-', '*')} {self.pick(n(), v(), self.constant())})",
            f"({self.pick(n(), self.constant())} * {v()})",
            f"torch.{self.pick('sin', 'tanh', 'square', 'sigmoid')}({v()})",
            f"{v()}.{self.pick('cos', 'abs', 'atan')}()",
            f"(MATRIX @ {v()})",
            f"({v()} @ MATRIX.T)",
            f"torch.matmul(MATRIX, {v()})",
            f"F.linear({v()}, MATRIX, {self.pick('WEIGHTS', v())})",
            f"F.{self.pick('softplus', 'silu', 'relu', 'elu')}({v()})",
            f"torch.stack([{n()}, {n()}, {n()}])",
            f"torch.cat(({v()}[1:], {v()}[:2]))[:3]",
            f"turned({v()})",
            f"squashed({v()}, rate={self.pick('0.25', 'a', 'SCALE')})",
            f"torch.where({v()} > {self.pick(n(), '0')}, {v()}, {v()})",
            f"{v()}.clamp(min=-1.0)",
        )

    def statement(self, indent: str = "    ") -> None:
        kind = self.random.random()
        if kind < 0.4:
            name, value = f"n{len(self.lines)}", self.number()
            self.lines.append(f"{indent}{name} = {value}")
            self.numbers.append(name)
        elif kind < 0.75:
            name, value = f"v{len(self.lines)}", self.vector()
            self.lines.append(f"{indent}{name} = {value}")
            self.vectors.append(name)
        elif kind < 0.85:
            names = [f"p{len(self.lines)}_{place}" for place in range(3)]
            self.lines.append(f"{indent}{', '.join(names)} = {self.vector()}")
            self.numbers += names
        else:
            name = f"s{len(self.lines)}"
            self.lines.append(f"{indent}{name} = {self.vector(0)} * 0.5")
            self.vectors.append(name)
            self.lines.append(f"{indent}for i in range({self.pick(2, 3)}):")
            self.lines.append(
                f"{indent}    {name} = {self.pick(f'{name} * 0.5 + {self.vector(1)}', f'torch.sin({name} + i)')}"
            )

    def text(self) -> str:
        for _ in range(self.random.randint(2, 6)):
            self.statement()
        result = self.pick(self.number(), self.vector(), f"{self.number()}, {self.vector()}")
        return "\n".join(["def f(x, y, a):", *self.lines, f"    return {result}"])


def straight_program(seed: int, dtype: torch.dtype) -> tuple[Callable, str]:
    """The program of a seed, and its text."""
    text = f"{_PRELUDE}\n{Writer(seed).text()}\n"
    name = f"<straight program {seed} {dtype}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space: dict[str, Any] = {"DTYPE": dtype}
    exec(compile(text, name, "exec"), space)
    return space["f"], text
