"""Transforms of the tests. Workers import this module and nothing that is slow to import."""

import os


def shout(sample: dict[str, bytes]) -> dict[str, bytes]:
    """Rename one component, and keep another."""
    return {"loud.txt": sample["txt"].upper() + b"!", "cls": sample["cls"]}


def same(sample: dict[str, bytes]) -> dict[str, bytes]:
    return sample


def drop_odd(sample: dict[str, bytes]) -> dict[str, bytes]:
    return sample if int(sample["cls"]) % 2 == 0 else {}


def as_text(sample: dict[str, bytes]) -> dict[str, object]:
    return {"txt": "no bytes"}


def forget(sample: dict[str, bytes]) -> None:
    """Return nothing, by mistake."""


def misname(sample: dict[str, bytes]) -> dict[str, bytes]:
    return {"a/b": b""}


def fail(sample: dict[str, bytes]) -> dict[str, bytes]:
    return {"txt": sample["gone"]}


def environment(sample: dict[str, bytes]) -> dict[str, bytes]:
    """Return the names of all environment variables, and print much, which must not disturb the answer."""
    print("a line " * 20_000)
    return {"txt": "\n".join(os.environ).encode()}
