"""A loader for loops that were written for DALI's iterators: other output names, column labels, automatic reset."""

import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nvidia.dali.plugin.pytorch import DALIGenericIterator

from dali_pipes.arguments import as_bool
from dali_pipes.graph.dali_internals import set_auto_reset
from dali_pipes.graph.definition import LABEL_OUTPUT, label_advice

if TYPE_CHECKING:
    from dali_pipes.delivery import Delivery

_AUTO_RESET = {False: False, None: False, "no": False, True: True, "yes": True}  # as DALI takes it


class DaliIterator(DALIGenericIterator):  # type: ignore[misc]
    """A loader that gives batches as DALI's ``DALIClassificationIterator`` does. Made by `Loader.as_dali`.

    It has no state of its own: iterating or closing it iterates or closes the loader, whose attributes it has.
    ``arguments`` are those of the method, by name.
    """

    _last_batch_padded = True  # as DALI's iterators say it: after FILL the next epoch begins at its beginning

    def __init__(self, loader: DALIGenericIterator, arguments: Mapping[str, Any]) -> None:
        self._column_labels, auto_reset = as_bool("column_labels", arguments["column_labels"]), arguments["auto_reset"]
        # numpy's bools equal a key and are taken. 1 equals True, too, but an integer is refused everywhere.
        if type(auto_reset) is int or auto_reset not in _AUTO_RESET:
            raise ValueError(f"auto_reset must be a bool, 'yes', 'no' or None, got {auto_reset!r}")
        # DALI's own constructor would claim the pipeline a second time; the attributes that it sets are the loader's.
        self._loader, self._arguments = loader, arguments
        self._delivery: Delivery = loader.delivery
        self._is_automatic = _AUTO_RESET[auto_reset]
        set_auto_reset(self, self._is_automatic)
        self._reader_name, self._ever_consumed = arguments["reader_name"], False
        self._token: object | None = None  # of an iteration that has begun
        if self._delivery.is_open:
            _ = self._names

    @property
    def output_map(self) -> list[str]:
        """The names of the outputs, in the graph's order."""
        return list(self._names.values())

    @property
    def _output_categories(self) -> set[str]:
        return set(self.output_map)

    @functools.cached_property
    def _names(self) -> dict[str, str]:
        """Map each output's name in the graph to the given name. The names are checked when the graph is known."""
        parts, arguments = self._delivery.parts, self._arguments
        graph_outputs = parts.decode.output_names
        names = _checked_names(graph_outputs, arguments["output_map"], added=self._delivery.added_outputs)
        if self._column_labels and LABEL_OUTPUT not in graph_outputs:
            raise ValueError(
                f"column_labels needs an output 'label', the graph gives {', '.join(graph_outputs)}"
                f"{label_advice(graph_outputs)}"
            )
        _check(arguments, policy=parts.batching.last_batch_policy, rank_samples=self._loader._size)
        return dict(zip(graph_outputs, names, strict=True))

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # not set yet, for instance while a copy is made
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __enter__(self) -> "DaliIterator":
        return self

    def __exit__(self, *_: object) -> None:
        self._delivery.close()

    def __len__(self) -> int:
        return self._delivery.num_batches_of()

    def __iter__(self) -> "DaliIterator":
        self._delivery.begin()
        self._token = None
        return self

    def __next__(self) -> list[dict[str, Any]]:
        _ = self._names  # refused here, not when a batch is there
        self._ever_consumed = True
        self._token = self._delivery.claim(self._token)
        try:
            return [self._delivery.next_batch(self._renamed, taker=self._token)]
        except StopIteration:
            if self._is_automatic:
                self._delivery.set_epoch(self._delivery.current.number + 1)
            raise

    def _renamed(self, batch: dict[str, Any]) -> dict[str, Any]:
        if self._column_labels:
            batch[LABEL_OUTPUT] = batch[LABEL_OUTPUT].reshape(-1, 1)
        return {self._names.get(name, name): output for name, output in batch.items()}

    def reset(self) -> None:
        """Start the next epoch: see `Loader.reset`."""
        self._delivery.reset()

    def checkpoints(self) -> Any:
        """Refuse: see `Loader.checkpoints`."""
        return self._loader.checkpoints()

    @property
    def _counter(self) -> int:
        """Count the samples of this epoch that a rank has had. As in DALI, a short last batch counts as full."""
        batching, plan = self._delivery.parts.batching, self._delivery.current.feed.plan
        position = self._delivery.current.position
        if plan.order.shapes is None:
            num_steps = -(-position // batching.global_batch_size)
        else:
            num_steps = plan.num_steps(batching) - plan.num_steps(batching, start=position)
        return num_steps * batching.batch_size


def _check(arguments: Mapping[str, Any], *, policy: str, rank_samples: int) -> None:
    """Refuse arguments that contradict the loader's policy or the samples of a rank."""
    names = ("last_batch_policy", "fill_last_batch", "last_batch_padded", "size")
    asked, fill_last_batch, last_batch_padded, size = (arguments[name] for name in names)
    given = f"last_batch_policy={asked}"
    if asked is None and fill_last_batch is not None:
        asked, given = ("PARTIAL", "FILL")[fill_last_batch], f"fill_last_batch={fill_last_batch}"
    if asked is not None and str(getattr(asked, "name", asked)).upper() != policy:
        raise ValueError(
            f"the loader was opened with last_batch_policy='{policy}', and as_dali() got {given}; pass the policy to "
            "dali_pipes.loader"
        )
    if size not in (-1, rank_samples):
        raise ValueError(f"size must be left out: this rank has {rank_samples} samples in an epoch, got {size!r}")
    if last_batch_padded is not None and not last_batch_padded and policy == "FILL":
        raise ValueError(
            "last_batch_padded=False has an epoch begin after the samples that filled the last batch of the epoch "
            "before; a loader gives each sample once an epoch; leave it out"
        )


def _checked_names(graph_outputs: list[str], output_map: Sequence[str] | None, *, added: Sequence[str]) -> list[str]:
    names = list(graph_outputs if output_map is None else output_map)
    if isinstance(output_map, str) or len(names) != len(graph_outputs):
        raise ValueError(
            f"output_map must name the graph's {len(graph_outputs)} outputs ({', '.join(graph_outputs)}), got "
            f"{output_map!r}{label_advice(graph_outputs)}"
        )
    if len(set(names)) != len(names):
        raise ValueError(f"output_map must not name an output twice, got {names}")
    for name in added:
        if name in names:
            raise ValueError(f"output_map must not name an output '{name}', which the loader adds, got {names}")
    return names
