"""Make the data set that each setting reads: packed anew, put on a server, behind a gateway."""

import os
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from bench.compare.settings import TurnSetting
from bench.loaders.opening import prepare_loader
from bench.loaders.protocol import Prepared
from bench.loaders.registry import LOADERS
from bench.tools.folders import RunFolder, check_room
from bench.tools.gateway import Gateway, check_upstream
from bench.tools.object_server import ObjectServer, upload_shards
from bench.tools.repeat import repeat_shards
from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.errors import DataError
from dali_pipes.formats.names import LABEL_COMPONENT, manifest_name
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_shards
from prep.inspect.indexed_set import IndexedSet

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


BUCKET = "dali-pipes-bench"


@dataclass(frozen=True, kw_only=True)
class DataFacts:
    """A description of a data set, for records, and for telling whether two records are of the same data."""

    num_samples: int
    num_shards: int
    shard_bytes: int
    needed_bytes: int
    """Of the components that a sample is made of: photo, mask, label."""
    digest: str
    """Of the manifest: the same shards have the same, wherever they lie."""

    def to_json(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class OpenedData:
    """The input of a setting's loaders."""

    shards: ShardSet
    """As they lie, for comparing outputs."""
    endpoint: str | None
    """Where loaders read them: the gateway, where there is one; ``None`` for local shards."""
    facts: DataFacts
    counters: Path | None
    """Of the gateway."""

    def urls_of_rank(self, rank: int, num_ranks: int) -> tuple[str, ...]:
        """Every ``num_ranks``-th shard, from the ``rank``-th on: no loader deals out samples, all take shards."""
        return tuple(self.shards.store.locate(name) for name in self.shards.names[rank::num_ranks])


class DataSets:
    """All data sets of one run; a context manager that ends its servers and gateways.

    Args:
        shards: As they were named.
        photo: Component that holds the photo.
        mask: Component that holds the mask.
        num_samples: The samples are repeated to this number; ``None``: as they are.
        direct: No gateway before a cluster: bytes are not counted.
        folder: Where what is packed anew is written, and served from; it needs space for it.
    """

    def __init__(
        self,
        shards: ShardSet,
        *,
        photo: str,
        mask: str,
        folder: RunFolder,
        num_samples: int | None = None,
        direct: bool = False,
    ) -> None:
        self._shards = shards
        self._photo, self._mask = photo, mask
        self._num_samples = num_samples
        self._direct = direct
        self._stack = ExitStack()
        self._folder = folder
        self._sets: dict[tuple[object, ...], tuple[ShardSet, DataFacts]] = {}
        self._gateways: dict[tuple[str, float], Gateway] = {}
        self._server: ObjectServer | None = None
        self._prepared: dict[tuple[object, ...], Prepared | None] = {}

    def check(self, settings: "Sequence[TurnSetting]", *, loaders: "Collection[str]" = ()) -> None:
        """Refuse settings that no data set can be made for, before any is made.

        Args:
            settings: All that will be opened.
            loaders: All whose conversions will be asked for.

        Raises:
            ValueError: If a latency is to be added without a gateway, or to a cluster that none can stand before;
                ranks are more than the shards; or there is too little space for the copies of all settings.
        """
        store = self._shards.store
        for setting in settings:
            if setting.latency_ms is not None and self._direct:
                raise ValueError("--direct and a latency exclude each other: it is the gateway that adds it")
            num_shards = setting.shards or len(self._shards.names)
            if num_shards < setting.ranks:
                raise ValueError(
                    f"each rank needs a shard, got ranks={setting.ranks} with {num_shards} shards; pack the samples "
                    f"into more: --num-shards {setting.ranks}"
                )
            if self._num_samples is not None and self._num_samples < num_shards:
                raise ValueError(f"{num_shards} shards need as many samples, got --samples {self._num_samples}")
        if store.endpoint is not None and not self._direct:
            check_upstream(store.endpoint)
        if needed := self._copied_bytes(settings, loaders):
            check_room(self._folder.parent, needed, what=f"what this run packs, serves and converts of '{store.url}'")

    def open(self, setting: TurnSetting) -> OpenedData:
        """The data set of one setting; made at its first use.

        Raises:
            DataError: If a shard cannot be read.
            ValueError: If there are fewer samples than shards, or too little space for what is packed or served.
        """
        shards, facts = self._made(setting)
        upstream = shards.store.endpoint
        if upstream is None or self._direct:
            return OpenedData(shards=shards, endpoint=upstream, facts=facts, counters=None)
        latency_s = (setting.latency_ms or 0.0) / 1000
        if (upstream, latency_s) not in self._gateways:
            self._gateways[upstream, latency_s] = self._stack.enter_context(Gateway(upstream, latency_s=latency_s))
        gateway = self._gateways[upstream, latency_s]
        return OpenedData(shards=shards, endpoint=gateway.endpoint, facts=facts, counters=gateway.counters)

    def prepared(self, loader: str, setting: TurnSetting) -> list[Prepared | None]:
        """What the loader had made of each rank's shards; once a data set, and read from where they lie.

        Raises:
            PipesError: If the loader cannot be opened here.
        """
        shards, _ = self._made(setting)
        made = []
        for rank in range(setting.ranks):
            key = (loader, self._key(setting), rank, setting.ranks)
            if key not in self._prepared:
                part = ShardSet(store=shards.store, names=shards.names[rank :: setting.ranks])
                self._prepared[key] = prepare_loader(loader, part, directory=self._folder.new())
            made.append(self._prepared[key])
        return made

    def drop_pages(self, setting: TurnSetting, prepared: "Sequence[Prepared | None]") -> None:
        """Have the kernel forget what it holds of the files that a cold turn will read, as far as a user may.

        Files in shared memory have no other place, and those of a cluster are its own: both stay.
        """
        shards, _ = self._made(setting)
        paths = [Path(one.url) for one in prepared if one is not None]
        if shards.store.directory is not None:
            paths += [Path(shards.store.locate(name)) for name in shards.names]
        for path in paths:
            for file in [path] if path.is_file() else sorted(path.rglob("*")):
                if file.is_file():
                    _drop_pages(file)

    @property
    def bystanders(self) -> set[int]:
        """The servers' processes, whose CPU time counts for no loader."""
        return {gateway.pid for gateway in self._gateways.values()} | ({self._server.pid} if self._server else set())

    def close(self) -> None:
        """End servers and gateways. Can be called twice."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _is_anew(self, setting: TurnSetting) -> bool:
        """Whether samples are packed into other shards than those that were named."""
        return setting.data != (None, None) or self._num_samples is not None

    def _is_served(self, setting: TurnSetting) -> bool:
        """Whether loaders read it from a bucket."""
        return self._shards.store.cluster is not None or setting.latency_ms is not None

    def _key(self, setting: TurnSetting) -> tuple[object, ...]:
        return (*setting.data, self._is_served(setting))

    def _made(self, setting: TurnSetting) -> tuple[ShardSet, DataFacts]:
        key = self._key(setting)
        if key not in self._sets:
            shards = self._make(setting)
            self._sets[key] = shards, _facts(shards, components=(self._photo, self._mask, LABEL_COMPONENT))
        return self._sets[key]

    def _make(self, setting: TurnSetting) -> ShardSet:
        shards = self._shards
        is_anew = self._is_anew(setting)
        if is_anew:
            shards = repeat_shards(
                shards,
                directory=self._folder.new(),
                num_samples=self._num_samples,
                num_shards=setting.shards,
                photo_side=setting.photo_side,
                photo=self._photo,
                mask=self._mask,
            )
        if self._is_served(setting) and shards.store.directory is not None:
            shards = self._served(shards)
        if is_anew or shards is not self._shards:
            index_shards(shards)
        return shards

    def _served(self, shards: ShardSet) -> ShardSet:
        """A copy of local shards in a bucket of a server of our own."""
        if self._server is None:
            self._server = self._stack.enter_context(ObjectServer(self._folder.new()))
        return upload_shards(shards, self._server.endpoint, f"{BUCKET}-{len(self._sets)}")

    def _copied_bytes(self, settings: "Sequence[TurnSetting]", loaders: "Collection[str]") -> int:
        """What lies in the folder in the end, as far as is known before a shard is read: see `repeat_shards`, too.

        Photos of another size, and shards without a manifest, are left out.
        """
        where = self._shards.store.locate(manifest_name(self._shards.prefix))
        try:
            if (found := find_manifest(self._shards)) is None:
                return 0
            manifest = found.select(self._shards.names, where=where)
        except DataError:
            return 0  # of other shards; samples that are packed anew need none
        num_samples = manifest.num_samples if self._num_samples is None else self._num_samples
        set_bytes = manifest.total_bytes * num_samples // max(1, manifest.num_samples)
        num_converted = sum(LOADERS[name].source == ("converted",) for name in set(loaders))
        sized = [setting for setting in settings if setting.photo_side is None]
        copies = sum(
            is_anew + (is_served and (is_anew or self._shards.store.directory is not None))
            for is_anew, is_served in ((self._is_anew(of), self._is_served(of)) for of in self._distinct(sized))
        )
        conversions = num_converted * len({(self._key(setting), setting.ranks) for setting in sized})
        return (copies + conversions) * set_bytes

    def _distinct(self, settings: "Sequence[TurnSetting]") -> "Collection[TurnSetting]":
        """One of all settings that read the same data set."""
        return {self._key(setting): setting for setting in settings}.values()


def _facts(shards: ShardSet, *, components: "Sequence[str]") -> DataFacts:
    found = IndexedSet(shards)
    needed = sum(
        int(index.sizes[component].sum())
        for _, index in found.each()
        for component in components
        if component in index.sizes
    )
    return DataFacts(
        num_samples=found.manifest.num_samples,
        num_shards=len(shards.names),
        shard_bytes=found.manifest.total_bytes,
        needed_bytes=needed,
        digest=found.manifest.digest,
    )


def _drop_pages(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())  # a page that is not written yet cannot be dropped
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
