"""Watch loaders while they run: figures for Prometheus, and spans for OpenTelemetry.

`Loader.stats` gives the same figures as a plain dict, and needs no package.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dali_pipes.metrics.hf_callback import HFCallback as HFCallback
    from dali_pipes.metrics.lightning_callback import LightningCallback as LightningCallback
    from dali_pipes.metrics.prometheus import LoaderCollector as LoaderCollector
    from dali_pipes.metrics.prometheus import serve as serve
    from dali_pipes.metrics.prometheus import write_textfile as write_textfile

# Resolved when first used: every loader counts, and only some jobs have prometheus-client.
_HOMES = {
    "HFCallback": "metrics.hf_callback",
    "LightningCallback": "metrics.lightning_callback",
    "LoaderCollector": "metrics.prometheus",
    "serve": "metrics.prometheus",
    "write_textfile": "metrics.prometheus",
}
# Module -> the package to install if its import fails.
_PACKAGES = {
    "metrics.hf_callback": "transformers",
    "metrics.lightning_callback": "dali-pipes[lightning]",
    "metrics.prometheus": "dali-pipes[metrics]",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"dali_pipes.{_HOMES[name]}"), name)
    except ModuleNotFoundError as exc:
        advice = f"install: pip install '{_PACKAGES[_HOMES[name]]}'"
        raise ImportError(f"{__name__}.{name} needs {exc.name}; {advice}", name=exc.name) from exc


def __dir__() -> list[str]:
    return __all__
