"""Import modules when a test first uses them, so that pytest collects tests without torch and DALI."""

import importlib
from typing import Any


class Lazy:
    """A module that is imported at its first use: ``fn = Lazy("nvidia.dali.fn")``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith(("__", "_pytest")):  # pytest asks every object of a test module for these
            raise AttributeError(attribute)
        return getattr(importlib.import_module(self._name), attribute)
