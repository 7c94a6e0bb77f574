"""`make models`: compare the project with independent models of its promises.

A model is a function of random numbers and an empty folder. It makes data, does what a user would do, and holds the
results against what the documents say. It knows nothing of how the project does it. A failure is printed with what was
drawn and with the command that repeats it: ``.venv/bin/python -m tests.models NAME --seed SEED --draws 1``.
"""

import argparse
import logging
import random
import reprlib
import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from tests.models import changes, epochs, tars, users

Model = Callable[[np.random.Generator, Path], str]

MODELS: dict[str, Model] = {
    model.__name__: model
    for model in (
        users.plan,
        epochs.epochs,
        epochs.resume,
        epochs.selection,
        epochs.mixture,
        epochs.buckets,
        changes.versions,
        changes.bad_samples,
        tars.reader,
        tars.loops,
        users.faces,
        users.statistics,
    )
}
# One draw of `plan` takes about 30 ms, one of another model 0.5 to 2 s.
_EACH_ROUND = Counter({"plan": 20})
PRINT_S = 60.0


def draw(name: str, seed: int) -> str:
    """Run one comparison, and return a text that says what it compared.

    Raises:
        AssertionError: If model and project differ.
    """
    folder = Path(tempfile.mkdtemp(prefix="model-"))
    try:
        return MODELS[name](np.random.default_rng(seed), folder)
    finally:
        shutil.rmtree(folder)


def drawn(error: Exception) -> str:
    """The variables of the model, or of its innermost function, where it failed."""
    places = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if "models" in frame.f_code.co_filename]
    return "".join(f"    {name} = {reprlib.repr(value)}\n" for name, value in places[-1].f_locals.items())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.models", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help="which models (default: all)")
    parser.add_argument("--minutes", type=float, default=1.0, help="for all models together (default: 1)")
    parser.add_argument("--draws", type=int, help="draws of each model, in place of minutes")
    parser.add_argument("--seed", type=int, help="of the first draw (default: another one each time)")
    given = parser.parse_args(argv)
    names = given.models or list(MODELS)
    if unknown := set(names) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    seed = random.SystemRandom().randrange(1 << 30) if given.seed is None else given.seed
    logging.disable(logging.WARNING)
    print(f"first seed {seed}; lines of libpng are about photos that a model damages", flush=True)
    start = printed = time.monotonic()
    counts: Counter[str] = Counter()
    failures = 0
    first = seed
    while counts[names[0]] < given.draws if given.draws else time.monotonic() - start < 60 * given.minutes:
        for name in names:
            for number in range(1 if given.draws else _EACH_ROUND[name] or 1):
                try:
                    said = draw(name, seed + number)
                    if given.draws:
                        print(f"{name}, seed {seed + number}: {said}", flush=True)
                except Exception as error:  # noqa: BLE001 - every exception is a finding
                    failures += 1
                    traceback.print_exc(file=sys.stdout)
                    command = f"{sys.executable} -m tests.models {name} --seed {seed + number} --draws 1"
                    print(f"{drawn(error)}repeat: {command}", flush=True)
                counts[name] += 1
        seed += max(_EACH_ROUND.values())
        if time.monotonic() - printed > PRINT_S:
            printed = time.monotonic()
            print(", ".join(f"{name} {num}" for name, num in counts.items()), flush=True)
    minutes = (time.monotonic() - start) / 60
    print(", ".join(f"{name} {num}" for name, num in counts.items()))
    print(f"{counts.total()} draws in {minutes:.1f} minutes, seeds from {first} on: {failures} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
