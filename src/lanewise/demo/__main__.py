"""Entry of `python -m lanewise.demo`."""

import argparse
import importlib.util
import sys
from pathlib import Path

import torch

_DESCRIPTION = """
Find wrong labels among handwritten digits with the gradient of every single example: train with clipped per-sample
gradients, rank the examples, compare one call with the loop, train eight networks at once, and check a Jacobian and a
Hessian against differences. Prints tables and saves a figure; half a minute on one thread, nothing to download.
"""


def main(arguments: list[str] | None = None) -> int:
    """Run the demo; return 0, or 2 where a package that it needs is missing."""
    parser = argparse.ArgumentParser(prog="python -m lanewise.demo", description=_DESCRIPTION)
    parser.add_argument("--output", type=Path, default=Path("output"), help="folder for the figure (default: output)")
    parser.add_argument(
        "--quick", action="store_true", help="fewer epochs and examples: rougher numbers in a few seconds"
    )
    options = parser.parse_args(arguments)
    missing = missing_packages()
    if missing:
        print(
            f"The demo needs {' and '.join(missing)}, which this Python does not have.\n"
            "Install the extra:  pip install '.[examples]'",
            file=sys.stderr,
        )
        return 2
    from lanewise.demo.story import run  # noqa: PLC0415  (needs the packages that were looked for above)

    threads = torch.get_num_threads()
    # One thread: the network is too small to gain from more, and the numbers then do not depend on the machine's cores.
    torch.set_num_threads(1)
    try:
        run(options.output, quick=options.quick)
    finally:
        torch.set_num_threads(threads)
    return 0


def missing_packages() -> list[str]:
    """Names, as pip knows them, of the packages that the demo needs and that are not installed."""
    needed = {"scikit-learn": "sklearn", "matplotlib": "matplotlib"}
    return [name for name, module in needed.items() if importlib.util.find_spec(module) is None]


if __name__ == "__main__":
    sys.exit(main())
