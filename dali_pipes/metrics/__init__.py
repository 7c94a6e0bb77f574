"""Watch loaders while they run: figures for Prometheus, and spans for OpenTelemetry.

`Loader.stats` gives the same figures as a plain dict, and needs no package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dali_pipes.lightning import LightningCallback as LightningCallback
    from dali_pipes.metrics.prometheus import LoaderCollector as LoaderCollector
    from dali_pipes.metrics.prometheus import serve as serve
    from dali_pipes.metrics.prometheus import write_textfile as write_textfile
    from dali_pipes.transformers import HFCallback as HFCallback

# Resolved when first used: every loader counts, and only some jobs have the packages that these need.
_HOMES = {
    "HFCallback": "transformers",
    "LightningCallback": "lightning",
    "LoaderCollector": "metrics.prometheus",
    "serve": "metrics.prometheus",
    "write_textfile": "metrics.prometheus",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"dali_pipes.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
