"""Packages that only trainers need: `make integrations` installs them."""

import importlib
import os

import pytest


def need(*packages: str) -> None:
    """Skip the calling test module where a package is missing; under REQUIRE_TRAINERS=1 fail instead.

    >>> need("torch")
    """
    for package in packages:
        if os.environ.get("REQUIRE_TRAINERS") == "1":
            importlib.import_module(package)
        else:
            pytest.importorskip(package, reason=f"{package} is not installed; make integrations")
