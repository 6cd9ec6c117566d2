"""Random programs whose control flow depends on lane values."""

import linecache
import random

import torch

D = torch.float64
FLOATS = ("a", "b", "c")
INTS = ("m", "n")


class Writer:
    """Writes one program: `f(x, k)` of x [3] float64 and k [] int64, with a number as its result."""

    def __init__(self, seed: int, in_place: bool, kinds: bool) -> None:
        self.random = random.Random(seed)
        self.in_place = in_place
        self.kinds = kinds
        self.lines: list[str] = []
        self.loops = 0
        self.counters = 0
        self.depth = 0
        self.budget = self.random.randint(8, 22)

    def pick(self, *choices: str) -> str:
        return self.random.choice(choices)

    def write(self, text: str) -> None:
        self.lines.append("    " * (self.depth + 1) + text)

    # --- expressions ---------------------------------------------------------------------------------------------

    def integer(self) -> str:
        a, b = self.pick(*INTS), self.pick(*INTS)
        return self.pick(
            a, a, "int(k)", f"({a} + 1)", f"({a} * 2 - {b})", f"({a} % 3)", f"abs({a} - {b})", f"max({a}, {b})", "2"
        )

    def float(self) -> str:
        a, b = self.pick(*FLOATS), self.pick(*FLOATS)
        return self.pick(
            a,
            f"{a} * {b} * 0.5",
            f"({a} + {b}).sin()",
            f"{a} - 0.3 * {b}",
            f"({a} * 1.5).tanh()",
            f"x[{self.integer()} % 3] * 1.0",
            f"{a} * ({self.integer()} % 4) * 0.25",
            f"({a} if {self.condition()} else {b} * 0.7)",
            f"helper({a}, {self.integer()} % 3)",
            f"(x * {a}).sum() * 0.2",
            f"torch.where({a} > 0, {a}, {b} * 0.5)",
        )

    def condition(self) -> str:
        a, b = self.pick(*FLOATS), self.pick(*FLOATS)
        simple = self.pick(
            f"{a} > {self.random.uniform(-1, 1):.2f}",
            f"{a} > {b}",
            f"{self.integer()} < {self.integer()}",
            f"{self.integer()} % 2 == 0",
            f"-0.5 < {a} < {b}",
            "k > 1",
            "x.sum() > 0",
            f"x[{self.integer()} % 3] > 0.1",
        )
        shape = self.random.random()
        if shape < 0.12:
            return f"not ({simple})"
        if shape < 0.3:
            return f"({simple} {self.pick('and', 'or')} {a} < 0.4)"
        return simple

    # --- statements ----------------------------------------------------------------------------------------------

    def block(self) -> None:
        self.depth += 1
        for _ in range(self.random.randint(1, 3)):
            if self.budget > 0:
                self.statement()
        self.write(f"{self.pick(*FLOATS)} = {self.float()}")
        self.depth -= 1

    def statement(self) -> None:
        self.budget -= 1
        kinds = ["float", "float", "int", "if", "if", "loop"] if self.depth < 4 else ["float", "int"]
        kinds += ["jump"] * (2 if self.loops else self.depth > 0)
        kinds += ["write"] * (2 * self.in_place) + ["raise", "call", "word"]
        kinds += ["kind"] * (6 * self.kinds)
        getattr(self, f"write_{self.random.choice(kinds)}")()

    def write_float(self) -> None:
        name = self.pick(*FLOATS)
        if self.random.random() < 0.2:
            if self.in_place:
                # What an operation has kept for its derivative must not be written to.
                self.write(f"{name} = {name}.clone()")
                self.write(f"{name} += {self.float()} * 0.5")
            else:
                self.write(f"{name} = {name} + {self.float()} * 0.5")
        elif self.random.random() < 0.15:
            self.write(f"a, {self.pick('b', 'c')} = {self.float()}, {self.float()}")
        else:
            self.write(f"{name} = {self.float()}")

    def write_int(self) -> None:
        name = self.pick(*INTS)
        self.write(self.pick(f"{name} = {self.integer()}", f"{name} += 1", f"{name} = {self.integer()} % 5"))

    def write_if(self) -> None:
        self.write(f"if {self.condition()}:")
        self.block()
        while self.random.random() < 0.25:
            self.write(f"elif {self.condition()}:")
            self.block()
        if self.random.random() < 0.5:
            self.write("else:")
            self.block()

    def write_loop(self) -> None:
        self.counters += 1
        counter = f"i{self.counters}"
        kind = self.random.random()
        self.loops += 1
        if kind < 0.4:
            self.write(f"{counter} = 0")
            self.write(f"while {counter} < {self.random.randint(2, 4)} and {self.condition()}:")
            self.depth += 1
            self.write(f"{counter} += 1")
            self.depth -= 1
        elif kind < 0.65:
            self.write(f"for {counter} in range({self.integer()} % 4):")
        elif kind < 0.8:
            self.write(f"for {counter}, b in enumerate(x * 1.0):")
        else:
            self.write(f"for {counter} in range({self.random.randint(1, 3)}):")
        self.block()
        self.loops -= 1
        if self.random.random() < 0.25:
            self.write("else:")
            self.block()

    def write_jump(self) -> None:
        jumps = [f"return {self.result()}"] + ["break", "continue"] * (2 * bool(self.loops))
        self.write(f"if {self.condition()}:")
        self.depth += 1
        if self.random.random() < 0.4:
            self.write(f"{self.pick(*FLOATS)} = {self.float()}")
        self.write(self.random.choice(jumps))
        self.depth -= 1

    def write_write(self) -> None:
        self.write(
            self.pick(
                f"v[{self.integer()} % 3] += {self.float()}",
                f"v[{self.integer()} % 3] = {self.float()}",
                "v.mul_(0.9)",
                f"v += {self.float()}",
                "v = v.clone()",
            )
        )

    def write_raise(self) -> None:
        self.write("try:")
        self.depth += 1
        self.write(f"if {self.condition()}:")
        self.write("    raise ValueError")
        self.write(f"{self.pick(*FLOATS)} = {self.float()}")
        self.depth -= 1
        self.write("except ValueError:")
        self.write(f"    {self.pick(*FLOATS)} = {self.float()}")

    def write_call(self) -> None:
        self.write(f"{self.pick(*FLOATS)}, {self.pick(*INTS)} = pair({self.pick(*FLOATS)}, {self.integer()} % 4)")

    def write_word(self) -> None:
        """A value that no tensor holds."""
        if self.random.random() < 0.7:
            self.write(f'word = "{self.pick("p", "q", "r")}"')
        else:
            self.write('a = a * {"p": 1.0, "q": 0.5, "r": -0.7}[word]')

    def write_kind(self) -> None:
        """A variable that is None in some lanes, a text, a function or a tuple."""
        name, own = self.pick("best", "best", "last", "span"), self.float()
        has, lacks = f"{name} is not None", f"{name} is None"
        value = {"best": own, "last": self.integer(), "span": f"({own}, {self.integer()})"}[name]
        number = {"best": "best", "last": "last", "span": "span[0]"}[name]
        a, word = self.pick(*FLOATS), self.pick("p", "q", "r")
        lines = self.pick(
            f"if {lacks} or {a} < {number}:\n    {name} = {value}",
            f"if {has} and {a} > {number}:\n    {name} = {value}\n    {a} = {a} - 0.2",
            f"{name} = {value} if {self.condition()} else {name}",
            f"{name} = {value} if {lacks} or {self.condition()} else None",
            f"{name} = None if {self.condition()} else {name}",
            f"{name} = None",
            f"if {self.condition()}:\n    {name} = {value}",
            f"{a} = {a} if {lacks} else {number} * 0.5 + {a}",
            f"{a} = {a} + 0.1 * ({name} == None) - 0.05 * (None is {name})",
            f"if not {name}:\n    {a} = {a} * 0.9\n    {name} = {value}",
            f"if {name}:\n    {a} = {a} * 1.1 + {number} * 0.1",
            f"try:\n    {a} = {a} + {number} * 0.2\nexcept TypeError:\n    {a} = {a} - 0.3",
            f'best, word = {own}, "{word}"',
            f"best = better(best, {own})",
            f"best = find({a}, {self.integer()} % 3)",
            f"best = find({a}, 1) or best",
            f"{a} = {a} + measure({name})",
            f"keep = {name} if {self.condition()} else word",
            f'word = "{word}" if {self.condition()} else word',
            f'if word == "{word}":\n    {a} = {a} * 0.8\nelif word in ("p", "q"):\n    {a} = {own}',
            f'if word != "{word}" and {has}:\n    word = "{word}"',
            f"act = {self.pick('torch.sin', 'torch.tanh', 'helper')}",
            f"{a} = act({a}, 1) if act is helper else act({a})",
            f"keep = {name}\nif keep is not None:\n    {a} = {a} + measure(keep)",
        )
        for line in lines.split("\n"):
            self.write(line)

    def result(self) -> str:
        if self.kinds:
            return f"{self.pick(*FLOATS)} + 0.1 * v.sum() + measure(best) + 0.3 * measure(last) - measure(span)"
        return f"{self.pick(*FLOATS)} + 0.1 * v.sum() + {self.float()}"

    def program(self) -> str:
        self.write("a, b, c = x[0] * 1.0, x[1] * 0.8, x[2] - 0.2")
        self.write("v = x.clone()")
        self.write("m, n = int(k), 1")
        self.write('word = "p"')
        if self.kinds:
            self.write("best = last = span = keep = None")
            self.write("act = torch.sin")
        while self.budget > 0:
            self.statement()
        if self.kinds:
            self.write("a = a + measure(best) * 0.7 - measure(last) * 0.3 + measure(span) + measure(keep)")
        self.write("return a + b * 2 - c + v.sum() + 0.01 * m - 0.02 * n + 0.1 * ord(word)")
        return HELPERS + "\ndef f(x, k):\n" + "\n".join(self.lines) + "\n"


HELPERS = """
def helper(y, n):
    if y > 0.2:
        return y * 0.9
    for i in range(n):
        y = y - 0.1 * i
        if y < -0.5:
            break
    return y.sin()

def better(best, y):
    if best is None or y < best:
        return y
    return best * 0.9

def find(y, n):
    for i in range(n):
        if y > 0.1 * i:
            return y * 1.2 - 0.1 * i
        y = y + 0.3
    return None

def measure(thing):
    if thing is None:
        return 0.1
    if isinstance(thing, str):
        return 0.2 * ord(thing)
    if isinstance(thing, tuple):
        return thing[0] * 0.3 + 0.01 * thing[1]
    return 0.4 * thing

def pair(y, n):
    if n == 0:
        return y * 0.5, 1
    if y > 0:
        return y, n
    z, count = pair(y + 0.4, n - 1)
    return z * 1.1, count + 1
"""


def program(seed: int, in_place: bool, kinds: bool = False):
    """The function of a seed, whose source can be found, and its text."""
    text = Writer(seed, in_place, kinds).program()
    name = f"<fuzz {seed} {in_place} {kinds}>"
    linecache.cache[name] = (len(text), None, text.splitlines(True), name)
    space = {"torch": torch, "__name__": "fuzzed"}
    exec(compile(text, name, "exec"), space)
    return space["f"], text
