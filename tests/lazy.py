"""Modules that are imported when a test first uses them: tests are collected without torch and DALI."""

import importlib
from typing import Any


class Lazy:
    """Stands for a module; ``fn = Lazy("nvidia.dali.fn")``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("__", "_pytest")):  # asked by pytest of all that a test module holds
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
