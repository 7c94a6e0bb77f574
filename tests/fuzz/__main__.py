"""Fuzz by hand: ``python -m tests.fuzz --minutes 30``, or ``make fuzz MINUTES=30``.

A line has the inputs so far that a target has taken, and those that it has refused with an error of ours. A finding
is printed with the command that checks its input again.
"""

import argparse
import contextlib
import random
import sys
from pathlib import Path

from tests.fuzz.harness import Outcome, fuzz
from tests.fuzz.targets.all import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("targets", nargs="*", metavar="TARGET", help="what to fuzz (default: all)")
    parser.add_argument("--minutes", type=float, default=1.0, help="for all targets together (default: 1)")
    parser.add_argument("--seed", type=int, default=None, help="of the first round (default: another one each time)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where inputs of findings are written")
    parser.add_argument("--input", type=Path, help="check this one input of TARGET in this process")
    given = parser.parse_args()
    names = given.targets or list(TARGETS)
    if unknown := set(names) - set(TARGETS):
        parser.error(f"no such target: {', '.join(sorted(unknown))}; there are {', '.join(TARGETS)}")
    if given.input:
        with contextlib.closing(TARGETS[names[0]]()) as target:
            target.seeds()
            print(target.check(given.input.read_bytes()))
        return 0
    seed = random.SystemRandom().randrange(1 << 30) if given.seed is None else given.seed
    print(f"seed {seed}")
    num_findings = 0
    for name in names:

        def report(outcome: Outcome, name: str = name) -> None:
            print(f"{name}: {outcome}", flush=True)

        outcome = fuzz(name, seconds=60 * given.minutes / len(names), seed=seed, keep=given.keep, report=report)
        print("".join(f"  {finding}\n" for finding in outcome.findings), end="", flush=True)
        num_findings += len(outcome.findings)
    print(f"{num_findings} findings" if num_findings else "no crash, no hang, no wrong byte")
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main())
