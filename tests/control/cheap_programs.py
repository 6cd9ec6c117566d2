"""Random programs of elementwise operations on numbers, which run with masks in place of branches."""

import linecache
import random
from collections.abc import Callable

import torch


class Writer:
    """Writes one program: `f(x, y)` of a number y, and a number or (`wide`) a vector x, which returns such as x."""

    def __init__(self, seed: int, wide: bool = False) -> None:
        self.wide = wide
        # Those of numbers, the first of which are left as they are.
        self.names = ("y", "u", "v") if wide else ("y", "x", "u", "v")
        self.random = random.Random(seed)
        self.lines: list[str] = []
        self.loops = 0
        self.budget = self.random.randint(3, 12)

    def pick(self, *choices: str) -> str:
        return self.random.choice(choices)

    def number(self, depth: int = 0) -> str:
        if self.wide and self.random.random() < 0.3:
            return self.pick(
                "x[0]", "x[-1]", "x.norm()", "(x * w).sum()", "x.dot(w)", "(w + y).max()", "(w @ x)", "x.mean()"
            )
        a, b = self.pick(*self.names), self.pick(*self.names)
        if depth == 2 or self.random.random() < 0.3:
            return self.pick(a, f"{a} * 0.5", f"({b} + {a})", "y")
        inner = self.number(depth + 1)
        return self.pick(
            f"({inner}).sqrt()",
            f"({inner} + 1).log()",
            f"({a} / ({inner}))",
            f"({inner} * {b})",
            f"({inner} - {self.random.choice([0.5, 1, 2])})",
            f"torch.sin({inner})",
            f"({inner}).tanh()",
            f"({inner}) ** 2",
            f"(-{inner})",
            f"abs({inner})",
            f"({inner}).clamp(min=-1, max=2)",
            f"torch.maximum({inner}, {b})",
            f"({inner} if {self.condition()} else {self.pick(a, b, '0.0', '1')})",
            f"helper({inner})",
            f"torch.zeros_like({a})",
            f"SCALE * ({inner})",
        )

    def vector(self) -> str:
        a, b = self.pick("x", "w"), self.pick("x", "w")
        return self.pick(
            f"{a} * {self.number(1)}",
            f"{a} / {b}",
            f"({a} - {b} * 0.5).tanh()",
            f"{a}.sqrt()",
            f"torch.sin({a}) + {self.number(1)}",
            f"torch.zeros_like({a})",
            f"({a} if {self.condition()} else {b} * 2)",
            a,
        )

    def value(self) -> str:
        """What the program may return."""
        return self.vector() if self.wide else self.number()

    def condition(self) -> str:
        a, b = self.pick(*self.names), self.pick(*self.names)
        if self.wide and self.random.random() < 0.3:
            return self.pick("x.sum() > 0", "(x > -1).all()", "(w < x).any()", f"x.norm() <= {a} * 2", "x[1] != 0")
        simple = self.pick(f"{a} > {b}", f"{a} < 0.5", "y == 0", f"{a} >= 0", f"abs({a} - {b}) <= 1", f"-1 < {a} < 1")
        other = self.pick(f"{b} < 1", "y != 0", f"{a} * {b} > 0")
        return self.pick(simple, simple, f"{simple} and {other}", f"{simple} or {other}", f"not {simple}")

    def block(self, depth: int, in_loop: bool) -> None:
        for _ in range(self.random.randint(1, 3)):
            self.statement(depth, in_loop)

    def write(self, depth: int, text: str) -> None:
        self.lines.append("    " * depth + text)

    def statement(self, depth: int, in_loop: bool) -> None:
        self.budget -= 1
        kind = self.random.random()
        if kind < 0.4 or self.budget < 0 or depth > 3:
            if self.wide and self.random.random() < 0.5:
                self.write(depth, f"{self.pick('x', 'w')} = {self.vector()}")
            else:
                self.write(depth, f"{self.pick(*self.names[1:])} = {self.number()}")
        elif kind < 0.45:
            self.write(depth, "u, v = v, u")
        elif kind < 0.47 and depth > 1:
            self.write(depth, f"total += {self.number()}")
        elif kind < 0.5:
            sign = self.pick("1", "1.0", "0.5")
            self.write(depth, f"s = {sign} if {self.condition()} else -{sign}")
            self.write(depth, f"v = s * {self.pick(*self.names)}")
        elif kind < 0.8:
            self.write(depth, f"if {self.condition()}:")
            self.block(depth + 1, False)
            if not in_loop and not self.loops and self.random.random() < 0.4:
                constant = [] if self.wide else ["0.0"]
                self.write(depth + 1, f"return {self.pick(self.value(), 'x', 'torch.ones_like(x)', *constant)}")
            if self.random.random() < 0.5:
                self.write(depth, f"elif {self.condition()}:" if self.random.random() < 0.3 else "else:")
                self.block(depth + 1, False)
        elif self.loops < 2:
            self.loops += 1
            loop = self.loops
            if self.random.random() < 0.5:
                self.write(depth, f"for i{loop} in range({self.random.randint(1, 4)}):")
            else:
                self.write(depth, f"w{loop} = abs({self.pick(*self.names)}).clamp(max=3)")
                self.write(depth, f"while w{loop} > 0.5:")
                self.write(depth + 1, f"w{loop} = w{loop} - {self.random.choice([0.4, 0.7])}")
            self.block(depth + 1, True)
            if self.random.random() < 0.5:
                self.write(depth + 1, f"if {self.condition()}:")
                if self.random.random() < 0.5:
                    self.write(depth + 2, f"u = {self.number()}")
                    self.write(depth + 2, "break")
                elif self.loops > 1 or depth > 1 or self.random.random() < 0.5:
                    self.write(depth + 2, "break")
                else:
                    self.write(depth + 2, f"return {self.value()}")
                self.block(depth + 1, True)
            self.loops -= 1 if depth == 1 else 0
        else:
            self.write(depth, f"v = {self.number()}")

    def program(self) -> str:
        start = ["w = x * 0.5 + y", "u, v = x.norm() - 1, x[1]"] if self.wide else ["u, v = x, y * 1.0"]
        self.lines = ["def f(x, y):", *[f"    {line}" for line in start]]
        self.lines.append("    total = y * 2")
        self.block(1, False)
        self.write(1, f"if {self.condition()}:")
        self.write(2, f"return {self.value()}")
        self.block(1, False)
        self.write(1, f"return {self.value()} + total")
        return "\n".join(self.lines) + "\n"


class Wider(Writer):
    """Programs with further statements: those that raise, flags, counters, entries of vectors, calls of all kinds."""

    def statement(self, depth: int, in_loop: bool) -> None:
        if self.random.random() < 0.6 or depth > 3 or self.budget < 0:
            super().statement(depth, in_loop)
            return
        self.budget -= 1
        self.counts = getattr(self, "counts", 0) + 1
        n, u, a = f"n{self.counts}", self.pick(*self.names[1:]), self.pick(*self.names)
        kinds = ["asserts", "raises", "counter", "flag", "calls", "unpacks", "skips", "positions"]
        getattr(self, f"write_{self.pick(*kinds, *['entries'] * (2 * self.wide))}")(depth, n, u, a)

    def write_asserts(self, depth: int, n: str, u: str, a: str) -> None:
        self.write(depth, self.pick(f"assert {a} * 0 == 0 or {u} > 1", f'assert abs({a}) < 9, f"{{{a}}}"'))

    def write_raises(self, depth: int, n: str, u: str, a: str) -> None:
        self.write(depth, f"if {a} > 20:")
        self.write(depth + 1, f'raise ValueError("large: {a}")')
        if self.random.random() < 0.5:
            self.write(depth, "else:")
            self.write(depth + 1, f"{u} = {self.number()}")

    def write_counter(self, depth: int, n: str, u: str, a: str) -> None:
        self.write(depth, f"{n} = 0")
        self.write(depth, f"while {self.pick(f'{n} < 3 and {a} < 2', f'{a} < 1 and {n} <= 2', f'{n} != 3')}:")
        self.write(depth + 1, f"{n} += 1")
        self.write(depth + 1, f"{u} = {self.number()}")
        if self.random.random() < 0.4:
            self.write(depth + 1, f"if {self.condition()}:")
            self.write(depth + 2, self.pick("break", f"{a} = {u} * 0.5" if a != "y" else "break"))
        self.write(
            depth, self.pick(f"{u} = {u} + {n}", f"if {n} > 1:\n{'    ' * (depth + 1)}v = v * {n}", f"v = {n} - v")
        )

    def write_flag(self, depth: int, n: str, u: str, a: str) -> None:
        self.write(depth, f"{n} = False")
        self.write(depth, f"for j{n} in range(3):")
        self.write(depth + 1, f"if not {n}:")
        self.write(depth + 2, f"{u} = {self.number()}")
        self.write(depth + 1, f"if {self.condition()}:")
        self.write(depth + 2, f"{n} = True")
        self.write(depth, f"if {n}:")
        self.write(depth + 1, f"v = {self.number()}")

    def write_calls(self, depth: int, n: str, u: str, a: str) -> None:
        call = self.pick(
            f"halved({a})", f"halved({a}, least=0.7)", f"halved({a}, 0.3)", f"power({a}, 3)", f"tower({a})"
        )
        self.write(depth, self.pick(f"{u} = {call}", f"{u} = {call} if {self.condition()} else {a}"))

    def write_unpacks(self, depth: int, n: str, u: str, a: str) -> None:
        self.write(depth, f"u, v = both({a}, {self.pick(*self.names)})")

    def write_skips(self, depth: int, n: str, u: str, a: str) -> None:
        self.write(depth, f"for i{n} in range({self.random.randint(2, 4)}):")
        if self.random.random() < 0.5:
            self.write(depth + 1, f"{u} = {self.number()}")
        self.write(depth + 1, f"if {self.condition()}:")
        if self.random.random() < 0.5:
            self.write(depth + 2, f"v = {self.number()}")
        self.write(depth + 2, "continue")
        self.write(depth + 1, f"{u} = {self.number()} + i{n}")
        for _ in range(self.random.randint(0, 3)):
            kind = self.random.random()
            if kind < 0.25 and depth < 3:
                self.block(depth + 1, True)
            elif kind < 0.45:
                self.write(depth + 1, f"for k{n} in range(3):")
                self.write(depth + 2, f"if {self.condition()}:")
                if self.random.random() < 0.3:
                    self.write(depth + 3, f"v = {self.number()}")
                self.write(depth + 3, self.pick("break", "continue"))
                self.write(depth + 2, f"{u} = {self.number()}")
            self.write(depth + 1, f"if {self.condition()}:")
            if self.random.random() < 0.3:
                self.write(depth + 2, f"if {self.condition()}:")
                self.write(depth + 3, self.pick("continue", "break"))
                self.write(depth + 2, f"{u} = {self.number()}")
            if self.random.random() < 0.7:
                self.write(depth + 2, self.pick("continue", "break"))
            else:
                self.write(depth + 2, f"v = {self.number()}")
                self.write(depth + 1, "else:")
                self.write(depth + 2, self.pick("continue", "break"))
            self.write(depth + 1, f"v = {self.number()}")

    def write_positions(self, depth: int, n: str, u: str, a: str) -> None:
        """Branches on numbers that all lanes share."""
        self.write(depth, f"for i{n} in range(3):")
        self.write(depth + 1, f"if i{n} % 2 == 0:")
        self.write(depth + 2, f"{u} = {self.number()}")
        self.write(depth + 1, f"elif {a} > 0:")
        self.write(depth + 2, f"v = {u} * i{n}")

    def write_entries(self, depth: int, n: str, u: str, a: str) -> None:
        w = self.pick("x", "w")
        self.write(
            depth,
            self.pick(f"for i{n} in range(len({w})):", f"for e{n} in {w}:", f"for i{n}, e{n} in enumerate({w}):"),
        )
        e = f"{w}[i{n}]" if "for e" not in self.lines[-1] and "," not in self.lines[-1] else f"e{n}"
        u = self.pick("u", "v")
        self.write(depth + 1, f"if {e} > {a}:")
        self.write(depth + 2, self.pick("continue", "break", f"{u} = {e}"))
        self.write(depth + 1, f"{u} = {self.pick(u, a)} + {e} * 0.5")


HELPER = """
SCALE = 1.5

def helper(t):
    if t < 0:
        return -t
    return t.sqrt() * 0.5

def halved(t, least=0.5):
    while abs(t) > least:
        t = t * 0.5
        if t < -1:
            return t
    return t + least

def power(t, n):
    if n == 0:
        return t * 0 + 1
    rest = power(t * t, n // 2)
    return rest if n % 2 == 0 else t * rest

def tower(t):
    if t > 1:
        return tower(t * 0.5) * 0.9
    return t.sin()

def both(a, b):
    if a < b:
        return a * 0.5, b
    return b, a - b

"""


def program(seed: int, wide: bool = False, writer: type[Writer] = Writer) -> tuple[Callable, str]:
    """The function of a seed, whose source can be found, and its text."""
    text = HELPER + writer(seed, wide).program()
    name = f"<cheap {seed} {wide} {writer.__name__}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space = {"torch": torch, "__name__": "cheap"}
    exec(compile(text, name, "exec"), space)
    return space["f"], text
