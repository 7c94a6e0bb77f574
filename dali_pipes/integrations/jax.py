"""A loader for JAX: batches as `jax.Array`, on one device or dealt to the devices of a mesh. JAX is imported here only.

# Note [rows]: with a sharding, the batches of all ranks are one array. Rank r has its r-th block of rows. A process
gives the rows of its own devices, so the mesh says which rank it must be: processes that hold the same rows, because
the mesh splits the model over them, must be the same rank. With another rank the rows of an array would differ from
process to process, and JAX would not notice.
"""

from collections.abc import Callable
from typing import Any

import torch

from dali_pipes.delivery import Delivery
from dali_pipes.integrations.data_loader import EachIter, LoaderBatches, OutputNames
from dali_pipes.order.plan import Batching

try:
    import jax
    from jax.sharding import Sharding
except ImportError as exc:
    raise ImportError("as_jax() needs JAX; install: pip install jax, or 'jax[cuda12]' for GPUs") from exc

# Where JAX has no 64-bit types; other types become narrower there, too, but only these two would change their values.
_NARROW = {torch.int64: torch.int32, torch.uint64: torch.uint32}


class JaxBatches(LoaderBatches):
    """The batches of a loader as `jax.Array`. Made by `Loader.as_jax`, which says what the arguments mean."""

    def __init__(
        self, delivery: Delivery, *, outputs: OutputNames, sharding: Sharding | None, each_iter: EachIter
    ) -> None:
        if sharding is not None and not isinstance(sharding, Sharding):
            raise TypeError(
                "sharding must be a jax.sharding.Sharding, such as NamedSharding(mesh, PartitionSpec('data')), got "
                f"{sharding!r}"
            )
        self._sharding = sharding
        super().__init__(delivery, outputs=outputs, each_iter=each_iter)

    def check_outputs(self) -> Callable[[dict[str, Any]], Any]:
        """As for any face; also check that the sharding fits the loader, and make arrays of the tensors."""
        choose, to_array = super().check_outputs(), self._to_array()

        def convert(name: str, output: Any) -> Any:
            return to_array(name, output) if isinstance(output, torch.Tensor) else output

        def make(batch: dict[str, Any]) -> Any:
            chosen = choose(batch)
            if isinstance(chosen, dict):
                return {name: convert(name, output) for name, output in chosen.items()}
            return tuple([convert(name, output) for name, output in zip(self._outputs or (), chosen, strict=True)])

        return make

    def _to_array(self) -> Callable[[str, torch.Tensor], jax.Array]:
        parts, sharding = self.delivery.parts, self._sharding
        cuda = parts.decode.device_id
        if cuda is not None and not any(device.platform in ("cuda", "gpu") for device in jax.local_devices()):
            raise ValueError(
                f"the loader decodes on cuda:{cuda}, and this JAX has no CUDA devices; install jax[cuda12], or open "
                "the loader with device='cpu'"
            )
        if sharding is None:
            # Those of a GPU stay there.
            device = next(iter(jax.numpy.zeros(()).devices())) if cuda is None else None
            return lambda name, tensor: jax.dlpack.from_dlpack(_narrow(name, tensor), device=device)
        batching = parts.batching
        pieces = deal_rows(sharding, batching)
        if batching.last_batch_policy == "PARTIAL":
            raise ValueError(
                "a sharding needs batches of one size, and last_batch_policy is 'PARTIAL'; open the loader with "
                "'DROP', or with 'FILL' (Outputs(valid=True) then marks the samples that count)"
            )
        num_rows = batching.global_batch_size

        def deal(name: str, tensor: torch.Tensor) -> jax.Array:
            tensor = _narrow(name, tensor)
            parts = [jax.dlpack.from_dlpack(tensor[rows], device=device) for device, rows in pieces]
            return jax.make_array_from_single_device_arrays((num_rows, *tensor.shape[1:]), sharding, parts)

        return deal


def deal_rows(sharding: Sharding, batching: Batching) -> list[tuple[Any, slice]]:
    """Find the devices of this process, and the rows of the rank's batch that each holds: see Note [rows].

    Raises:
        ValueError: If the sharding has no device of this process, splits more than the first axis, or cannot divide the
            batch; or if the loader should be another rank.
    """
    batch_size, rank, world_size = batching.batch_size, batching.process.rank, batching.process.world_size
    num_devices = len(sharding.device_set)
    blocks_of: dict[int, set[tuple[int, int]]] = {}  # by process; with as many rows as devices any number divides them
    for device, rows in _rows_of_devices(sharding, num_devices).items():
        blocks_of.setdefault(device.process_index, set()).add(rows)
    mine = blocks_of.get(jax.process_index())
    if mine is None:
        raise ValueError(f"{sharding} has no device of this process, {jax.process_index()} of {jax.process_count()}")
    groups = sorted({tuple(sorted(blocks)) for blocks in blocks_of.values()})
    sizes = {sum(stop - start for start, stop in blocks) for blocks in groups}
    if len(sizes) > 1 or sum(map(len, groups)) != len(set().union(*groups)):
        raise ValueError(
            f"{sharding} deals the rows unevenly to the processes, {groups}; each process must hold as many rows as "
            "any other, and either the same rows or none of them"
        )
    must_be = groups.index(tuple(sorted(mine)))
    if (rank, world_size) != (must_be, len(groups)):
        raise ValueError(
            f"process {jax.process_index()} of {jax.process_count()} holds block {must_be} of the {len(groups)} blocks "
            f"of rows that {sharding} deals to processes; open the loader with rank={must_be}, "
            f"world_size={len(groups)}, not rank={rank}, world_size={world_size}"
        )
    try:
        rows_of = _rows_of_devices(sharding, batch_size * world_size)
    except ValueError as exc:
        raise ValueError(
            f"batch_size={batch_size} on each of {world_size} ranks makes {batch_size * world_size} rows, which the "
            f"sharding cannot divide: {exc}"
        ) from exc
    local = {device: rows for device, rows in rows_of.items() if device.process_index == jax.process_index()}
    starts = sorted({start for start, _ in local.values()})
    return [
        (device, slice(first := starts.index(start) * (stop - start), first + stop - start))
        for device, (start, stop) in local.items()
    ]


def _rows_of_devices(sharding: Sharding, num_rows: int) -> dict[Any, tuple[int, int]]:
    # With two axes, so that a sharding of the second one is seen.
    indices = sharding.devices_indices_map((num_rows, num_rows))
    if any(columns.indices(num_rows) != (0, num_rows, 1) for _, columns in indices.values()):
        raise ValueError(f"only the first axis, the samples of a batch, can be split, got {sharding}")
    return {device: rows.indices(num_rows)[:2] for device, (rows, _) in indices.items()}


def _narrow(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Integers as JAX will have them: of 32 bits unless ``jax_enable_x64`` is set."""
    narrow = _NARROW.get(tensor.dtype)
    if narrow is None or jax.dtypes.canonicalize_dtype("int64") == "int64":
        return tensor
    narrowed = tensor.to(narrow)
    if not torch.equal(narrowed.to(tensor.dtype), tensor):
        raise ValueError(
            f"output '{name}' has integers that need 64 bits, and JAX has 32; set jax.config.update('jax_enable_x64', "
            "True)"
        )
    return narrowed
