"""Describe a loader on a few lines, along the data path: what ``repr`` shows."""

from pathlib import Path

from dali_pipes.data_set.find import Mixture
from dali_pipes.delivery import Delivery
from dali_pipes.errors import printable
from dali_pipes.opening.arguments import LoaderArguments
from dali_pipes.order.inputs import OrderInputs
from dali_pipes.processes.ranks import NOTHING
from dali_pipes.store.urls import ShardUrls


def describe(delivery: Delivery) -> str:
    """Describe a loader: open, closed, or not opened yet."""
    if not delivery.is_open:
        return _describe_unopened(delivery.arguments, is_closed=delivery.is_closed)
    parts, epoch, shapes = delivery.parts, delivery.current, delivery.shapes
    manifest, batching, share = parts.inputs.manifest, parts.batching, parts.share
    process, num_excluded = batching.process, len(parts.inputs.selection.excluded)
    names = [*parts.decode.output_names, *delivery.added_outputs]
    return _lines(
        f"Loader of {parts.source}{', closed' if delivery.is_closed else ''}",
        data_set=f"manifest {manifest.digest[:12]}, "
        + (f"version {manifest.version}, " if manifest.version > 1 else "")
        + f"{manifest.num_samples} samples in {manifest.num_shards} shards"
        + (f", {num_excluded} samples left out" if num_excluded else ""),
        rank=f"{process.rank} of {process.world_size}, "
        + ("the only process" if process.source == NOTHING else f"by {process.source}"),
        order=_order(parts.inputs.order),
        batches=f"of {batching.batch_size} samples, {batching.last_batch_policy}; {delivery.num_batches_of()} in epoch "
        f"{epoch.number}, {epoch.position} of {epoch.num_samples} samples delivered",
        cache=f"{share.space.directory}, {_mib(share.reserved)} reserved of {_mib(share.cache_bytes)}",
        outputs=", ".join(f"{name} {shapes.get(name, '')}".strip() for name in names)
        + ("" if shapes else " (their shapes are known after the first batch)"),
        device=parts.decode.torch_device,
    )


def _describe_unopened(arguments: LoaderArguments, *, is_closed: bool) -> str:
    shards = arguments.shards
    if isinstance(shards, Mixture):
        urls = ", ".join(f"{name}={_joined(named)}" for name, named in shards.sets.items())
    else:
        urls = _joined(shards.urls)
    return _lines(
        f"Loader of {urls}, {'closed, and never opened' if is_closed else 'not opened yet'}",
        rank="late: found when the length or the first batch is asked for",
        order=_order(arguments.order),
        batches=f"of {arguments.batch_size} samples, {arguments.last_batch_policy}",
        device=arguments.device,
    )


def _joined(urls: ShardUrls) -> str:
    return str(urls) if isinstance(urls, str | Path) else ", ".join(map(str, urls))


def _order(order: OrderInputs) -> str:
    if not order.shuffle:
        text = "the manifest's, not shuffled"
    elif order.shuffle_window == "all":
        text = f"seed {order.seed}, shuffled as a whole"
    else:
        text = f"seed {order.seed}, shuffled in windows of {_mib(int(order.shuffle_window))}"
    options = {
        ", ramp-up": order.ramp_up,
        f", {order.num_slices} slices": order.num_slices > 1,
        f", weights {order.weights}": order.weights is not None,
        f", {order.shapes}": order.shapes is not None,
        f", {order.epoch_samples} samples an epoch": order.epoch_samples is not None,
    }
    return text + "".join(option for option, is_used in options.items() if is_used)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB"


def _lines(head: str, **lines: str) -> str:
    named = [f"  {name.replace('_', ' '):<8}  {printable(text)}" for name, text in lines.items()]
    return "\n".join([printable(head), *named])
