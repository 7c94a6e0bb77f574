"""Hold the options of a shuffle, check them before anything is read, and read them from a dSort spec."""

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from dali_pipes.data_set.named import shards_of
from dali_pipes.errors import StoreError
from dali_pipes.store.base import Bucket, Store
from dali_pipes.store.cloud.objects import CloudObjects
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.http.answers import ObjectRequest
from dali_pipes.store.http.client import HttpAccess, without_password
from dali_pipes.store.http.objects import ObjectFetcher
from dali_pipes.store.patience import IMPATIENT
from dali_pipes.store.patterns import Pattern, there_is
from dali_pipes.store.shard_names import EXTENSIONS, Template, check_object_name, extension_of
from dali_pipes.store.shard_set import ShardSet, named_missing
from dali_pipes.store.urls import is_remote, open_store
from prep.part import ALL, JobPart
from prep.shuffle.dsort import DsortSpec
from prep.shuffle.key_map import Grouping, KeyMap, parse_key_map
from prep.shuffle.order import Algorithm
from prep.workers import WorkersKind

Engine = Literal["auto", "dsort", "exchange"]

# A key map of a million keys takes about 30 MB.
MAX_KEY_MAP_BYTES = 1 << 30
# Missing shards that an error names.
_NUM_MISSING = 3


@dataclass(frozen=True)
class Request:
    """The input and the options of a shuffle.

    Raises:
        ValueError: If an option is out of range, or the engine does not support it.
    """

    shards: ShardSet
    """The input: ``.tar``, ``.tgz`` or ``.tar.gz``, all of one kind."""
    _: KW_ONLY
    output_prefix: str = "shuffled-"
    """The beginning of the output's names, within the bucket or directory. With a `KeyMap` the map names the shards."""
    target: Store | None = None
    """The store of the output; ``None``: the store of the input."""
    outputs: Template | None = None
    """The output's names without extension; ``None``: as many names under the prefix as are needed."""
    algorithm: Algorithm = field(default_factory=Algorithm)
    """The order. Its seed is also the seed of a `Grouping`."""
    shard_bytes: int | None = None
    """An output shard is full when its components take this many bytes; ``None``: the mean of the input's shards."""
    mapped: KeyMap | Grouping | None = None
    """Which shards each sample goes to, by its key."""
    drop_unmapped: bool = False
    """Leave out samples that a `KeyMap` does not name."""
    extension: str = ""
    """Extension of the output shards; empty: the input's."""
    engine: Engine = "auto"
    """``dsort``: the cluster. ``exchange``: workers, each of which reads the samples of its output shards
    (`prep.shuffle.exchange`). ``auto``: the cluster; but the exchange if input or output is in no cluster, if ``on`` or
    ``part`` ask for it, if it only has to complete the output of an earlier run, and, with a warning, if the cluster
    cannot do it."""
    on: WorkersKind = "processes"
    """Who does the tasks of an exchange: see `prep.workers.open_workers`."""
    jobs: int | None = None
    """The number of workers of an exchange; ``None``: see `prep.workers.open_workers`."""
    part: JobPart = ALL
    """The part of the output shards that an exchange writes. More than one part needs shard indexes of the input."""
    overwrite: bool = False
    """Replace shards that already exist under the output's names."""
    way_out: str = "choose another prefix with --output"
    """What errors advise if the output's names are taken."""
    dry_run: bool = False
    """Check and plan only. If the shards are indexed, the indexes are read instead of the shards."""
    show_progress: bool = False
    description: str = "dali-pipes prep shuffle"
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of a dSort spec that do not change the output."""

    def __post_init__(self) -> None:
        if self.outputs is None:
            # A rule adds the name of a class, a folder or a split.
            adds_name = isinstance(self.mapped, Grouping) and self.mapped.by != "balanced"
            _check_prefix(f"{self.output_prefix}{'x-' if adds_name else ''}", url=self.output_store.url)
        object.__setattr__(self, "extension", self.extension or input_extension(self.shards.names))
        if self.engine not in get_args(Engine):
            raise ValueError(f"engine must be one of {', '.join(get_args(Engine))}, got '{self.engine}'")
        if self.extension not in EXTENSIONS:
            raise ValueError(f"extension must be one of {', '.join(EXTENSIONS)}, got '{self.extension}'")
        if self.shard_bytes is not None and self.shard_bytes < 1:
            raise ValueError(f"shard_bytes must be positive, got {self.shard_bytes}")
        if self.drop_unmapped and not isinstance(self.mapped, KeyMap):
            raise ValueError("drop_unmapped leaves out samples that a key map does not name; no key map is given")
        self._check_shared()
        if self.engine == "dsort" and self.is_local:
            raise ValueError(
                f"'{self.shards.store.url}' is not in AIStore; engine 'dsort' runs in an AIStore cluster: use --engine "
                "exchange, or pack the shards into ais://BUCKET"
            )
        templates = [self.outputs] if self.outputs is not None else []
        templates += self.mapped.outputs if isinstance(self.mapped, KeyMap) else ()
        for template in templates:
            for end in template.ends():
                check_object_name(end, url=self.output_store.locate(end))

    def _check_shared(self) -> None:
        """Refuse what only an exchange does from another engine, and of compressed shards."""
        asked = f"--on {self.on}" if self.on != "processes" else "" if self.part.is_all else f"--part {self.part}"
        if asked and self.engine == "dsort":
            raise ValueError(f"{asked} goes with --engine exchange, not with --engine dsort")
        if asked and self.is_compressed:
            raise ValueError(f"compressed shards are unpacked on one machine: drop {asked}")

    @property
    def is_exchange(self) -> bool:
        """Whether it is sure before the plan that workers exchange the samples."""
        is_shared = self.on != "processes" or not self.part.is_all
        return self.engine == "exchange" or (self.engine == "auto" and (is_shared or self.is_local))

    @property
    def is_compressed(self) -> bool:
        """Whether the input is compressed."""
        return not self.shards.names[0].endswith(".tar")

    @property
    def output_store(self) -> Store:
        """The store of the output."""
        return self.target or self.shards.store

    @property
    def prefix(self) -> str:
        """The beginning of the output's names."""
        return self.output_prefix if self.outputs is None else self.outputs.prefix

    @property
    def is_local(self) -> bool:
        """Whether input or output is a directory, so that no cluster can do it."""
        return self.shards.store.cluster is None or self.output_store.cluster is None

    @property
    def needs_labels(self) -> bool:
        """Whether samples are grouped by class."""
        return isinstance(self.mapped, Grouping) and self.mapped.by in ("class", "balanced")


def _check_prefix(prefix: str, *, url: str) -> None:
    if not prefix or re.search(r"[{}\s]", prefix):
        raise ValueError(f"a prefix must not be empty or hold braces or white space, got '{prefix}'")
    if prefix.endswith("/") or prefix[-1].isdigit():
        raise ValueError(
            f"a prefix must end in a name's start that is not a digit, such as 'shuffled-', got '{prefix}'"
        )
    check_object_name(prefix, url=f"{url}/{prefix}")


def input_extension(names: Sequence[str]) -> str:
    """The extension of all shards; raises `ValueError` if they differ, or one has no known extension."""
    found = sorted({extension_of(name) for name in names})
    if "" in found or not found:
        odd = next((name for name in names if not extension_of(name)), "")
        raise ValueError(f"shards must all end in one of {', '.join(EXTENSIONS)}, got '{odd}'")
    if len(found) > 1:
        raise ValueError(f"shards must all end alike, got {' and '.join(found)}")
    return found[0]


def common_prefix(names: Sequence[str]) -> str:
    """The beginning of all names, digits included."""
    return os.path.commonprefix(names)  # noqa: RUF071 (by character is what is meant)


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of an epoch.

    >>> epoch_seed(0, 1), epoch_seed(0, 2), epoch_seed(1, 1)
    (8372147079113586533, 6049555782909542890, 1066406101564956322)
    """
    if epoch < 0:
        raise ValueError(f"epoch must not be negative, got {epoch}")
    return int.from_bytes(hashlib.blake2b(f"{seed}/epoch/{epoch}".encode(), digest_size=8).digest()) >> 1


def epoch_prefix(prefix: str, epoch: int) -> str:
    """The prefix of an epoch's shards. It does not start with ``prefix``, which still names one set.

    >>> epoch_prefix("train/shuffled-", 1)
    'train/e000001-shuffled-'
    """
    folder, slash, base = prefix.rpartition("/")
    return f"{folder}{slash}e{epoch:06d}-{base}"


def request_of_spec(spec: DsortSpec, *, endpoint: str, **options: Any) -> Request:
    """The request that a dSort spec describes.

    Args:
        spec: The spec.
        endpoint: The cluster.
        options: Fields of `Request` that a spec does not have, and ``dry_run``.

    Raises:
        StoreError: If an input shard does not exist, or the key map cannot be read.
        DataError: If the key map is invalid: see `parse_key_map`.
        ValueError: See `Request`.
    """
    store, target = (AisStore(endpoint, place.name, provider=place.provider) for place in (spec.source, spec.target))
    mapped = None
    if spec.ekm_file:
        mapped = load_key_map(
            spec.ekm_file, endpoint=endpoint, separator=spec.ekm_file_sep, extension=spec.output_extension
        )
    return Request(
        ShardSet(store=store, names=_spec_names(spec, store)),
        target=target if spec.target != spec.source else None,
        outputs=spec.outputs,
        algorithm=spec.algorithm,
        shard_bytes=spec.shard_bytes,
        mapped=mapped,
        extension=spec.output_extension,
        description=spec.description,
        settings=dict(spec.settings),
        **{**options, "dry_run": spec.dry_run or options.get("dry_run", False)},
    )


def _spec_names(spec: DsortSpec, store: Bucket) -> tuple[str, ...]:
    """The names of a spec's input shards; raises `StoreError` if some do not exist."""
    if not isinstance(spec.inputs, Template):
        return spec.inputs
    where = store.locate(spec.inputs.prefix)
    if not len(spec.inputs):
        # A cluster would accept a prefix and read nothing; here a prefix stands for its shards.
        pattern = Pattern(url=where, store=store, prefix=spec.inputs.prefix)
        found = [name for name in pattern.listing.shards if name.endswith(spec.input_extension)]
        if not found:
            raise StoreError(f"'{where}' matches no {spec.input_extension}{there_is(store, spec.inputs.prefix)}")
        shards = shards_of(pattern, found)
        if missing := [name for name in shards.names if store.locate(name) not in found]:
            raise shards.missing(missing)
        return tuple(shards.names)
    listed = [entry.name for entry in store.list_all(spec.inputs.prefix)]
    names, missing, existing = [], [], frozenset(listed)
    for stem in spec.inputs.names():
        names.append(f"{stem}{spec.input_extension}")
        if names[-1] not in existing:
            missing.append(names[-1])
        if len(missing) == _NUM_MISSING:
            break  # A template may stand for more names than memory holds.
    if missing:
        raise named_missing(store, missing, num_named=len(spec.inputs))
    return tuple(names)


def load_key_map(where: str, *, endpoint: str | None, separator: str = "", extension: str = ".tar") -> KeyMap:
    """Read an external key map from a file, an object (``ais://...``) or a URL.

    Raises:
        StoreError: If it cannot be read.
        DataError: If it is not a key map: see `parse_key_map`.
    """
    if where.startswith(("http://", "https://")):
        data = _download(where)
    elif is_remote(where):
        store, name = open_store(where, endpoint=endpoint)
        data = store.read(name)
    else:
        try:
            data = Path(where).read_bytes()
        except OSError as exc:
            raise StoreError(f"cannot read key map '{where}': {exc.strerror or exc}") from exc
    return parse_key_map(data, where=f"key map '{where}'", separator=separator, extension=extension)


def _download(url: str) -> bytes:
    def ask_for(_: str) -> ObjectRequest:
        return ObjectRequest(*without_password(url))

    source = CloudObjects(ask_for, locate=lambda name: name, access=HttpAccess.of_cloud(url), service="the server")
    try:
        with ObjectFetcher(source, patience=IMPATIENT) as objects:
            return objects.read(url, max_bytes=MAX_KEY_MAP_BYTES)
    except StoreError as exc:
        raise StoreError(f"cannot read key map: {exc}") from None
