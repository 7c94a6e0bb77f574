"""Give the figures of loaders to Prometheus' client."""

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from prometheus_client import Metric
from prometheus_client.registry import Collector

from dali_pipes.errors import printable
from dali_pipes.metrics.figures import FIGURES, LOADERS

_OWN_LABELS = ("data_set", "loader", "rank")


class Series(NamedTuple):
    """The figures of one loader, as they travel between processes."""

    labels: Mapping[str, str]
    figures: Mapping[str, float]


class LoaderCollector(Collector):
    """The figures of all loaders of this process, also of those that are opened later.

    A program that has a registry of `prometheus_client` adds them to it:
    ``prometheus_client.REGISTRY.register(dp.metrics.LoaderCollector())``.

    Args:
        labels: Further labels of every series, ``{"run": "resnet-7"}``. Each series has ``data_set``, ``loader`` (see
            `Loader.name`) and ``rank``.

    Raises:
        ValueError: If a label has no proper name, or the name of one of these three.
    """

    def __init__(self, *, labels: Mapping[str, str] | None = None) -> None:
        self._labels = _checked(labels or {})

    def collect(self) -> Iterator[Metric]:
        """Yield each figure as a metric, with a sample for each loader that has the figure."""
        series = self.series()
        for figure in FIGURES:
            kind = "counter" if figure.is_counter else "gauge"
            metric = Metric(figure.metric.removesuffix("_total"), figure.help, kind)
            for labels, figures in series:
                if figure.name in figures:
                    metric.add_sample(figure.metric, dict(labels), figures[figure.name])
            yield metric

    def series(self) -> list[Series]:
        """Read the figures that `collect` gives."""
        return [Series({**dict(labels), **self._labels}, figures) for labels, figures in LOADERS.read().items()]


def _checked(labels: Mapping[str, str]) -> dict[str, str]:
    for name in labels:
        if name in _OWN_LABELS or not re.fullmatch(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", name):
            raise ValueError(
                f"a label's name must have letters, digits and '_' only, and be none of {', '.join(_OWN_LABELS)}, "
                f"got {name!r}"
            )
    return {name: printable(str(value)) for name, value in labels.items()}
