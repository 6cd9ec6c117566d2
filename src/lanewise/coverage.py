"""`python -m lanewise.coverage`: which rule serves each operation of PyTorch, and what is known not to work."""

import argparse
import difflib
import sys
from collections import Counter
from pathlib import Path

import torch

from lanewise._core.batch import BATCH_RULES
from lanewise._core.dual import JVP_RULES
from lanewise._core.missing import find_rule
from lanewise._core.rules import RuleTable
from lanewise._gaps import KNOWN_GAPS, REFUSALS
from lanewise._torch_compat import OpOverload

CENSUS = Path(__file__).with_name("census.txt")


def census() -> list[OpOverload]:
    """The operations that the functions of torch come down to: all that its own database of them, op_db, reaches."""
    found = []
    for name in CENSUS.read_text().split():
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload, None)
        if isinstance(op, OpOverload):
            found.append(op)
    return found


def rule_class(op: OpOverload) -> str:
    """The class of the rule that serves an operation on lanes."""
    rule = BATCH_RULES.get(op)
    return (find_rule(RuleTable(), op) if rule is None else rule).family


def forward_class(op: OpOverload) -> str:
    """The class of the rule that carries tangents through an operation."""
    rule = JVP_RULES.get(op)
    return "torch's own formula, or by its backward" if rule is None else rule.family


def lane_loops() -> list[OpOverload]:
    """The operations without a rule, which run once per lane, with a warning."""
    return [op for op in census() if rule_class(op) == "lane loop"]


def _close(name: str, operations: list[OpOverload]) -> str:
    """Names that may be meant, as the end of a message."""
    plain = name.removeprefix("torch.").removeprefix("aten.")
    known = dict.fromkeys(str(op).split(".")[1] for op in operations)
    close = difflib.get_close_matches(plain.partition(".")[0], known, 4)
    return f"; there are {', '.join(close)}" if close else "; --all shows all"


def main(arguments: list[str] | None = None) -> int:
    """Print the report."""
    parser = argparse.ArgumentParser(prog="python -m lanewise.coverage", description=__doc__)
    parser.add_argument("names", nargs="*", help="show operations whose name contains one of these")
    parser.add_argument("--all", action="store_true", help="show every operation")
    options = parser.parse_args(arguments)
    operations = census()
    if options.names:  # also those that have a rule and that op_db does not reach
        operations = list(dict.fromkeys([*operations, *BATCH_RULES]))
    classes = {op: rule_class(op) for op in operations}
    shown = [op for op in operations if options.all or any(name in str(op) for name in options.names)]
    for op in shown:
        print(f"{str(op):60} lanes: {classes[op]:24} tangents: {forward_class(op)}")
    if options.names:
        missing = [name for name in options.names if not any(name in str(op) for op in operations)]
        for name in missing:
            print(f"no operation whose name contains {name!r}{_close(name, operations)}", file=sys.stderr)
        return 0 if shown else 1
    print(f"\n{len(operations)} operations of torch {torch.__version__}. Rules by class:")
    for family, count in Counter(classes.values()).most_common():
        print(f"  {count:5} {family}")
    loops = [str(op) for op in operations if classes[op] == "lane loop"]
    print(f"\n{len(loops)} run once per lane whatever their arguments, with a warning:")
    for name in loops:
        print(f"  {name}")
    print("\nKnown gaps (op_db entry, composition, reason); each raises an error:")
    for name, reasons in KNOWN_GAPS.items():
        for reason in dict.fromkeys(reasons.values()):
            where = ", ".join(key for key, why in reasons.items() if why == reason)
            print(f"  {name} ({where}): {reason}")
    print("\nRefused, because the law gives no answer:")
    for phrase, reason in REFUSALS.items():
        print(f"  {phrase!r}: {reason}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
