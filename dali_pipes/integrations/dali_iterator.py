"""A loader for loops that were written for DALI's iterators: other output names, column labels, automatic reset."""

from collections.abc import Sequence
from typing import Any

from nvidia.dali.plugin.pytorch import DALIGenericIterator

from dali_pipes.arguments import as_bool
from dali_pipes.graph.dali_internals import set_auto_reset
from dali_pipes.integrations.torch_dataset import LoaderLike

LABEL_OUTPUT = "label"
"""The name of the class id in the graphs of `dali_pipes.graph.pipelines`."""

_AUTO_RESET = {False: False, None: False, "no": False, True: True, "yes": True}  # as DALI takes it


class DaliIterator(DALIGenericIterator):  # type: ignore[misc]
    """A loader that gives batches as DALI's ``DALIClassificationIterator`` does. Made by `Loader.as_dali`.

    It has no state of its own: iterating or closing it iterates or closes the loader. All other attributes are those of
    the loader.
    """

    def __init__(
        self,
        loader: LoaderLike,
        *,
        output_map: Sequence[str] | None,
        column_labels: bool,
        auto_reset: bool | str | None,
    ) -> None:
        # DALI's own constructor would claim the pipeline a second time; the attributes that it sets are the loader's.
        self._loader = loader
        graph_outputs: list[str] = list(loader.output_map)
        self.output_map = _checked_names(graph_outputs, output_map, added=loader.added_outputs)
        self._has_column_labels = as_bool("column_labels", column_labels)
        if column_labels and LABEL_OUTPUT not in graph_outputs:
            raise ValueError(f"column_labels needs an output 'label', the graph gives {', '.join(graph_outputs)}")
        # 1 and numpy's bools are equal to a key, too; 1 is refused as anywhere else.
        if type(auto_reset) is int or auto_reset not in _AUTO_RESET:
            raise ValueError(f"auto_reset must be a bool, 'yes', 'no' or None, got {auto_reset!r}")
        self._is_automatic = _AUTO_RESET[auto_reset]
        set_auto_reset(self, self._is_automatic)
        self._names = dict(zip(graph_outputs, self.output_map, strict=True))

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet, for instance while a copy is made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __enter__(self) -> "DaliIterator":
        return self

    def __exit__(self, *_: object) -> None:
        self._loader.close()

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> "DaliIterator":
        iter(self._loader)
        return self

    def __next__(self) -> list[dict[str, Any]]:
        try:
            return [self._loader.next_batch(self._renamed)]
        except StopIteration:
            if self._is_automatic:
                self._loader.set_epoch(self._loader.epoch + 1)
            raise

    def _renamed(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._has_column_labels:
            batch[LABEL_OUTPUT] = batch[LABEL_OUTPUT].reshape(-1, 1)
        return {self._names.get(name, name): output for name, output in batch.items()}

    def reset(self) -> None:
        """Start the next epoch: see `Loader.reset`."""
        self._loader.reset()


def _checked_names(graph_outputs: list[str], output_map: Sequence[str] | None, *, added: Sequence[str]) -> list[str]:
    names = list(graph_outputs if output_map is None else output_map)
    if isinstance(output_map, str) or len(names) != len(graph_outputs):
        raise ValueError(
            f"output_map must name the graph's {len(graph_outputs)} outputs ({', '.join(graph_outputs)}), got "
            f"{output_map!r}"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"output_map must not name an output twice, got {names}")
    for name in added:
        if name in names:
            raise ValueError(f"output_map must not name an output '{name}', which the loader adds, got {names}")
    return names
