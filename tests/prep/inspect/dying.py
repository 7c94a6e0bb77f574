"""A worker's task that ends its process; a module of its own, because workers import it."""

import os


def die(*_: object) -> None:
    os.abort()
