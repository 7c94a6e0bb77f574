"""Fuzz by hand: ``python -m tests.fuzz --minutes 30``, or ``make fuzz MINUTES=30``."""

import argparse
import random
import sys
from pathlib import Path

from tests.fuzz.harness import Outcome, fuzz
from tests.fuzz.targets.all import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description="Give broken inputs to what reads them.")
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="what to fuzz (default: all)")
    parser.add_argument("--minutes", type=float, default=1.0, help="for all targets together (default: 1)")
    parser.add_argument("--seed", type=int, default=None, help="of the first round (default: another one each time)")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"), help="where inputs of findings are written")
    given = parser.parse_args()
    names = given.targets or list(TARGETS)
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
