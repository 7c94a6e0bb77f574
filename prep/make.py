"""The parts of ``prep make`` that no other command has: names, the splits, an index that is there, lines of Python."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import DataError, PipesError
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import MANIFEST_ENDING, described, start_of, version_start
from dali_pipes.formats.photo_header import is_photo
from dali_pipes.formats.photo_names import ComponentCounts, find_mask, find_photo, has_mask
from dali_pipes.store.base import Store
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import is_local
from prep.index import index_shards
from prep.pack.pack import DEFAULT_PREFIX
from prep.shuffle.key_map import Grouping
from prep.shuffle.order import Algorithm
from prep.shuffle.request import Request
from prep.shuffle.shuffle import ShuffleReport, shuffle
from prep.sources.coco import BOXES

UNSHUFFLED, SHUFFLED_PREFIX = "unshuffled/", "shuffled-"
BATCH_SIZE = 64
# Splits that are not trained on.
_EVALUATED = ("val", "valid", "validation", "dev", "eval", "test", "testing")


@dataclass(frozen=True, kw_only=True)
class Names:
    """The names of what is made in a store.

    >>> names = Names(base="birds-", splits=("train", "val"))
    >>> names.packed, names.sets
    ('birds-unshuffled/samples-', ('birds-train-', 'birds-val-'))
    """

    base: str
    """The beginning of all names: empty, or it ends in ``-``, ``_`` or ``/``."""
    splits: tuple[str, ...] = ()

    @property
    def packed(self) -> str:
        """The prefix of the packed shards: in a folder, so that a directory holds the shuffled ones alone."""
        return f"{self.base}{UNSHUFFLED}{DEFAULT_PREFIX}"

    @property
    def shuffled(self) -> str:
        """What the names of all shuffled shards begin with."""
        return self.base if self.splits else f"{self.base}{SHUFFLED_PREFIX}"

    @property
    def sets(self) -> tuple[str, ...]:
        """The prefix of each data set."""
        return tuple(f"{self.base}{split}-" for split in self.splits) or (self.shuffled,)


class MadeSet(NamedTuple):
    """A data set that can be loaded."""

    url: str
    split: str
    """Empty if there is only one set."""
    manifest: Manifest


def check_apart(source: str, dest: str) -> None:
    """Raise `ValueError` if shards would be written among the files of the source: the next run would find them."""
    folder, inside = Path(dest).resolve(), Path(source).resolve()
    if dest.endswith(("-", "_")) and not folder.is_dir():
        folder = folder.parent
    if is_local(dest) and inside.is_dir() and folder.is_relative_to(inside):
        raise ValueError(f"DEST '{dest}' lies in SOURCE '{source}'; name a folder beside it")


def check_unchanged(store: Store, names: Names) -> None:
    """Raise `ValueError` if a data set that would be made is there, and has versions: what was added would be lost."""
    for prefix in names.sets if store.exists() else ():
        if store.list(version_start(prefix)):
            raise ValueError(
                f"'{store.locate(prefix)}' is a data set with versions: it was changed since it was made; make into "
                "another DEST, or delete the data set first"
            )


def check_shares(shares: Mapping[str, float], *, seed: int) -> None:
    """Raise `ValueError` if these are no shares of splits."""
    if shares:
        Grouping(by="split", shares=shares, seed=seed)


def shuffle_packed(
    shards: ShardSet, names: Names, *, seed: int, shares: Mapping[str, float], **options: Any
) -> ShuffleReport:
    """Shuffle the packed shards, and separate the splits: by their shares, or else by folder.

    ``options`` are other fields of the request.
    """
    mapped = Grouping(by="folder") if names.splits else None
    request = Request(
        shards,
        output_prefix=names.shuffled,
        algorithm=Algorithm(seed=seed),
        mapped=Grouping(by="split", shares=shares, seed=seed) if shares else mapped,
        way_out="name another DEST",
        **options,
    )
    return shuffle(request)


def shards_of(store: Store, names: Sequence[str], prefix: str) -> ShardSet:
    """The shards among ``names`` that belong to the data set of a prefix."""
    found = [name for name in names if re.fullmatch(rf"{re.escape(prefix)}[0-9]+\.tar", name)]
    return ShardSet(store=store, names=tuple(found), manifest_prefix=prefix)


def sets_beside(store: Store, names: Names) -> list[str]:
    """URLs of the indexed data sets under the same base that are not among those of ``names``."""
    listed = [entry.name for entry in store.list(described(names.base))]
    found = [start_of(name, MANIFEST_ENDING) for name in listed if name.endswith(MANIFEST_ENDING)]
    own = {names.packed, *names.sets}
    return [store.locate(prefix) for prefix in found if prefix not in own and "/" not in prefix[len(names.base) :]]


def delete_packed(store: Store, names: Names) -> None:
    """Delete the packed shards, and their folder."""
    for entry in [*store.list(names.packed), *store.list(described(names.packed))]:
        store.delete(entry.name)
    if is_local(folder := store.locate(f"{names.base}{UNSHUFFLED}")):
        for path in (Path(folder) / described(""), Path(folder)):
            with contextlib.suppress(OSError):  # it holds other files
                path.rmdir()


def index_once(shards: ShardSet, *, overwrite: bool, show_progress: bool) -> tuple[Manifest, bool]:
    """The manifest of the shards, and whether it was there: with just these shards, in their sizes.

    Whoever replaces a shard deletes the manifest first.
    """
    try:
        manifest = find_manifest(shards)
    except DataError:
        manifest = None  # a broken one is replaced
    if manifest is not None and manifest.names == shards.names:
        sizes = [entry.size for entry in shards.entries()]
        if manifest.shard_bytes.tolist() == sizes:
            return manifest, True
    return index_shards(shards, overwrite=overwrite, show_progress=show_progress), False


def python_program(
    sets: Sequence[MadeSet],
    *,
    seed: int,
    masks: Sequence[str] | None = None,
    max_pixels: int | None = None,
    has_bad: bool = False,
    endpoint: str | None = None,
    embedded_dir: Path | None = None,
) -> str:
    """Lines of Python that load the data sets and show the first batch of each.

    Args:
        sets: The data sets.
        seed: Of the order.
        masks: The components that are masks; by default found by their names.
        max_pixels: The most pixels that a photo was allowed to have, if that is not the default.
        has_bad: Whether bad samples are in the data sets: others take their places.
        endpoint: A cluster's endpoint that the environment does not name.
        embedded_dir: The folder of the embedded node that has the buckets.
    """
    bad = ['on_error="substitute"'] if has_bad else []
    bad += [] if max_pixels is None else [f"max_pixels={max_pixels}"]
    options = f", bad_samples=dp.BadSamples({', '.join(bad)})" if bad else ""
    if embedded_dir is not None:
        options += ", endpoint=endpoint"
    elif endpoint is not None:
        options += f", endpoint={_quoted(endpoint)}"
    body: list[str] = []
    for made in sets:
        size = min(BATCH_SIZE, made.manifest.num_samples)
        last = ', last_batch_policy="PARTIAL"' if _is_evaluated(made.split) else ""
        # Boxes and texts are a list, with an entry for each photo.
        shape = "getattr(values, 'shape', len(values))" if _lists(made.manifest) else "tuple(values.shape)"
        arguments = f"{_quoted(made.url)}, {_graph(made, masks)}, batch_size={size}, seed={seed}{last}{options}"
        body += [
            f"with dp.loader({arguments}) as loader:",
            '    print(f"samples: {loader.num_samples}, batches: {len(loader)}")',
            "    for batch in loader.as_dicts():",
            f"        print({{name: {shape} for name, values in batch.items()}})",
            "        break",
        ]
    head = ["import dali_pipes as dp", ""]
    if embedded_dir is not None:
        head = [
            "from pathlib import Path",
            "",
            "import dali_pipes as dp",
            "from dali_pipes.store.cluster.endpoint import cluster",
            "",
            f"with cluster(None, embedded_dir=Path({_quoted(str(embedded_dir))})) as endpoint:",
        ]
        body = [f"    {line}" for line in body]
    return "\n".join([*head, *body]) + "\n"


def _graph(made: MadeSet, masks: Sequence[str] | None) -> str:
    """The call of the built-in graph that fits a data set's components."""
    counts = {"": ComponentCounts(made.manifest.components, made.manifest.num_samples)}
    try:
        photo, arguments = find_photo(counts), []
    except PipesError:
        photos = [name for name in made.manifest.components if is_photo(name) and name not in (masks or ())]
        photo = max(photos, key=lambda name: made.manifest.components[name], default="jpg")
        arguments = [f"photo={_quoted(photo)}"]
    manifest, whole = made.manifest, ["scale=None"] if _is_evaluated(made.split) else []
    if _lists(manifest) == [BOXES]:
        return f"dp.detection({', '.join([*arguments, *whole, *(['flip=0'] if whole else [])])})"
    if masks:
        arguments.append(f"mask={_quoted(';'.join(masks))}")
    if masks or (masks is None and _most_have_masks(counts[""], photo)):
        return f"dp.segmentation({', '.join(arguments)})"
    if not manifest.labels and (texts := _lists(manifest)):
        return f"dp.captions({', '.join([*arguments, *whole, f'text={_quoted(texts[0])}', 'tokens=None'])})"
    if not manifest.labels:
        return f"dp.multi_crop({', '.join(arguments)})"
    name = "classification_eval" if _is_evaluated(made.split) else "classification_train"
    return f"dp.{name}({', '.join(arguments)})"


def _lists(manifest: Manifest) -> list[str]:
    """The components of all samples that are lists in a batch: boxes, as COCO's photos have, else texts."""
    common = [name for name, number in manifest.components.items() if number == manifest.num_samples]
    return [BOXES] if BOXES in common else [name for name in common if name.rpartition(".")[2] in ("txt", "text")]


def _most_have_masks(counts: ComponentCounts, photo: str) -> bool:
    """Whether more than half of the samples have a mask; the PNG of a few is a second photo that was kept."""
    try:
        masks = find_mask({"": counts}, photo=photo).split(";") if has_mask({"": counts}, photo=photo) else []
    except PipesError:
        return True  # several: which one, the graph's error asks
    return 2 * sum(counts.components[name] for name in masks) > counts.num_samples


def _is_evaluated(split: str) -> bool:
    """Whether a split is not trained on, by its name: ``val``, ``Test``, ``val2017``."""
    return split.lower().rstrip("0123456789") in _EVALUATED


def _quoted(text: str) -> str:
    """A text in the program, in the quotes that formatters prefer."""
    return f'"{text}"' if text.isprintable() and not re.search(r'["\\]', text) else repr(text)
