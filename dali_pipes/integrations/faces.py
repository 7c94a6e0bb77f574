"""The faces of a loader: what its batches look like to the loops and trainers of others."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from nvidia.dali.plugin.base_iterator import LastBatchPolicy

from dali_pipes.integrations.dali_iterator import DaliArguments, DaliIterator
from dali_pipes.integrations.data_loader import EachIter, LoaderBatches, OutputNames
from dali_pipes.integrations.torch_dataset import DictBatches, LoaderDataset

if TYPE_CHECKING:
    from jax.sharding import Sharding

    from dali_pipes.integrations.jax import JaxBatches
    from dali_pipes.iterator import Loader


class Faces:
    """The methods ``as_...`` of a `Loader`, which inherits them."""

    def _loader(self) -> "Loader":
        return cast("Loader", self)

    def as_dali(
        self,
        *,
        output_map: Sequence[str] | None = None,
        column_labels: bool = False,
        auto_reset: bool | str | None = False,
        reader_name: str | None = "Reader",
        size: int = -1,
        fill_last_batch: bool | None = None,
        last_batch_padded: bool | None = None,
        last_batch_policy: LastBatchPolicy | str | None = None,
        dynamic_shape: object = None,
        prepare_first_batch: bool = False,
    ) -> DaliIterator:
        """Give the batches to a loop that was written for ``DALIClassificationIterator`` or another DALI iterator.

        With ``output_map=["data", "label"], column_labels=True`` the loop runs unchanged. The arguments after
        ``reader_name`` are those of DALI's iterators that change nothing here: the log says so.

        Args:
            output_map: New names of the graph's outputs, in their order; ``None``: the graph's own names.
            column_labels: Give ``"label"`` as [batch, 1] instead of [batch].
            auto_reset: Start the next epoch when one has ended, as DALI does.
            reader_name: What the attribute ``_reader_name`` is to be; a loader has no reader of that name.
            size: -1, or the samples of this rank in an epoch.
            fill_last_batch: ``True`` if the loader was opened with ``FILL``, ``False`` if with ``PARTIAL``.
            last_batch_padded: ``True``: after ``FILL`` each epoch begins with its first sample.
            last_batch_policy: The one with which the loader was opened.
            dynamic_shape: Anything.
            prepare_first_batch: The first batch is decoded when it is asked for, in any case.

        Raises:
            ValueError: If the names do not fit the graph's outputs, or there is no label; if an argument contradicts
                what the loader does.
        """
        arguments = DaliArguments(
            size=size,
            fill_last_batch=fill_last_batch,
            last_batch_padded=last_batch_padded,
            last_batch_policy=last_batch_policy,
            dynamic_shape=dynamic_shape,
            prepare_first_batch=prepare_first_batch,
        )
        return DaliIterator(
            self._loader(),
            output_map=output_map,
            column_labels=column_labels,
            auto_reset=auto_reset,
            reader_name=reader_name,
            arguments=arguments,
        )

    def as_dicts(self) -> DictBatches:
        """Give the ``len(loader)`` batches of an epoch as plain dicts, without the list around each."""
        return DictBatches(self._loader())

    def as_dataset(self) -> LoaderDataset:
        """Give the batches to torch's ``DataLoader(loader.as_dataset(), batch_size=None, num_workers=0)``, or to
        torchdata's ``StatefulDataLoader``, which resumes at the exact next batch. A new iteration is the next epoch, as
        of `as_dataloader`.
        """
        return LoaderDataset(self.as_dataloader())

    def as_dataloader(self, outputs: OutputNames = None, *, each_iter: EachIter = "next") -> LoaderBatches:
        """Give the batches to a trainer, as an object that it takes for a data loader and leaves alone.

        It has what trainers ask for: a length, ``set_epoch``, ``state_dict``, ``load_state_dict``, ``batch_size``,
        ``drop_last``, ``sampler``, ``dataset``. Do not give it to a function that prepares or splits data loaders.

        Args:
            outputs: ``None``: dicts by the graph's names. ``("image", "label")``: tuples in that order.
                ``{"pixel_values": "image", "labels": "label"}``: dicts with new names.
            each_iter: What a new iteration gives when batches of an epoch were delivered. ``"next"``: the next epoch.
                ``"rest"``: after `break` the rest of that epoch, as iterating the loader does. ``"same"``: that epoch
                again from its start, for validation. After ``load_state_dict`` or ``dali_pipes.loader(state=)`` the
                first iteration gives the rest of the state's epoch in any case.

        Raises:
            ValueError: If the loader gives no such output, or ``each_iter`` is none of these.
            RuntimeError: While iterating: if another iteration has taken batches of the loader since.
        """
        loader = self._loader()
        batches = LoaderBatches(loader, outputs=outputs, each_iter=each_iter)
        if loader.is_open:
            batches.check_outputs()
        return batches

    def as_jax(
        self, outputs: OutputNames = None, *, sharding: "Sharding | None" = None, each_iter: EachIter = "next"
    ) -> "JaxBatches":
        """Give the batches to JAX: `as_dataloader` with a `jax.Array` in place of each tensor.

        Texts, such as keys, stay lists of str. An array is not copied if its device is the one on which the loader
        decodes; the batch's memory lives as long as the array. Without ``jax_enable_x64`` integers have 32 bits, labels
        too.

        Args:
            outputs: As in `as_dataloader`. Leave texts such as ``"key"`` out of what ``jax.jit`` takes.
            sharding: How the devices of all processes share the first axis of the arrays, the samples:
                ``NamedSharding(mesh, PartitionSpec("data"))``. Each array then holds the batches of all ranks, rank 0's
                first. The last batch must be as large as all others: ``FILL`` or ``DROP``. ``None``: each process has
                arrays of its own, on the loader's GPU, else on JAX's default device.
            each_iter: As in `as_dataloader`.

        Raises:
            ImportError: If JAX is not installed.
            TypeError: If ``sharding`` is not a `jax.sharding.Sharding`.
            ValueError: If the sharding does not fit the loader's rank, batch size or last-batch policy, or splits
                another axis; if the loader decodes on a GPU that JAX does not know. While iterating: if an integer
                needs more bits than JAX has. Else as in `as_dataloader`.
        """
        from dali_pipes.integrations.jax import JaxBatches

        loader = self._loader()
        batches = JaxBatches(loader, outputs=outputs, sharding=sharding, each_iter=each_iter)
        if loader.is_open:
            batches.check_outputs()
        return batches
