"""Make the data set that each setting reads: packed anew, put on a server, behind a gateway."""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from bench.compare.settings import DataFacts, TurnSetting
from bench.compare.turn import TurnJob
from bench.loaders.encoded import shard_urls
from bench.loaders.protocol import LoaderOptions
from bench.loaders.registry import LoaderSpec, Prepared, prepare_loader, remove_prepared
from bench.tools.folders import RunFolder
from bench.tools.gateway import Gateway, check_upstream
from bench.tools.repeat import repeat_shards, upload_shards
from dali_pipes.data_set.indexing import find_manifest
from dali_pipes.formats.names import LABEL_COMPONENT, classes_name
from dali_pipes.store.cluster import embedded_node
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from prep.index import index_shards
from prep.inspect.indexed_set import IndexedSet

if TYPE_CHECKING:
    from dali_pipes.processes.programs import ServerProcess

BUCKET = "dali-pipes-bench"


class DataSets:
    """All data sets of one run, made when they are first asked for."""

    def __init__(
        self,
        shards: ShardSet,
        *,
        options: LoaderOptions,
        folder: RunFolder,
        stack: ExitStack,
        num_samples: int | None = None,
        direct: bool = False,
    ) -> None:
        self._shards, self._options = shards, options
        self._folder, self._stack = folder, stack
        self._num_samples, self._direct = num_samples, direct
        self._sets: dict[tuple[object, ...], tuple[ShardSet, DataFacts]] = {}
        self._gateways: dict[tuple[str, float], Gateway] = {}
        self._server: ServerProcess | None = None
        self._prepared: dict[tuple[object, ...], Prepared | None] = {}

    def check(self, settings: Sequence[TurnSetting]) -> None:
        """Refuse settings that no data set can be made for, before any is made."""
        store = self._shards.store
        for setting in settings:
            if setting.latency_ms is not None and self._direct:
                raise ValueError("--direct and a latency exclude each other: the gateway adds the latency")
            if setting.latency_ms is not None and store.cluster is None and store.directory is None:
                raise ValueError(
                    f"a latency is added before AIStore or the embedded node, got --latency-ms with '{store.url}'; "
                    "name a directory, or an ais:// bucket"
                )
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

    def shards(self, setting: TurnSetting) -> ShardSet:
        """Return the shards of a setting where they lie."""
        return self._open(setting)[0]

    def facts(self, setting: TurnSetting) -> DataFacts:
        """Return the description of a setting's shards."""
        return self._open(setting)[1]

    def _open(self, setting: TurnSetting) -> tuple[ShardSet, DataFacts]:
        key = self._key(setting)
        if key not in self._sets:
            shards = self._make(setting)
            self._sets[key] = shards, self._describe(shards)
        return self._sets[key]

    def turn_job(self, spec: LoaderSpec, setting: TurnSetting, *, options: LoaderOptions, epochs: int) -> TurnJob:
        """Return the job of a turn's processes; start a gateway if the setting needs one."""
        shards = self.shards(setting)
        endpoint, counter = shards.store.endpoint, None
        if endpoint is not None and not self._direct:
            place = endpoint, (setting.latency_ms or 0.0) / 1000
            if place not in self._gateways:
                self._gateways[place] = self._stack.enter_context(Gateway(endpoint, latency_s=place[1]))
            endpoint, counter = self._gateways[place].endpoint, self._gateways[place].counter
        return TurnJob(
            spec=spec,
            setting=setting,
            options=options,
            epochs=epochs,
            urls=tuple(shard_urls(shards)),
            prepared=tuple(self.prepared(spec.name, setting)),
            endpoint=endpoint,
            counter=counter,
        )

    def prepared(self, loader: str, setting: TurnSetting) -> list[Prepared | None]:
        """Return what the loader made of each rank's shards; it is made once for each data set."""
        shards = self.shards(setting)
        made = []
        for rank in range(setting.ranks):
            key = (loader, self._key(setting), rank, setting.ranks)
            if key not in self._prepared:
                part = ShardSet(store=shards.store, names=shards.names[rank :: setting.ranks])
                directory = self._folder.new()
                self._stack.callback(remove_prepared, loader, part, directory=directory)
                self._prepared[key] = prepare_loader(loader, part, directory=directory)
            made.append(self._prepared[key])
        return made

    def drop_pages(self, setting: TurnSetting, prepared: Sequence[Prepared | None]) -> None:
        """Drop the files that a cold turn will read from the page cache, as far as a user may.

        Files in shared memory stay, because they have no other place; so do those of a cluster.
        """
        shards = self.shards(setting)
        paths = [path for one in prepared if one is not None for path in one.directory.rglob("*")]
        if shards.store.directory is not None:
            paths += map(Path, shard_urls(shards))
        for path in paths:
            if path.is_file():
                with path.open("rb") as file:
                    os.fsync(file.fileno())  # a page that is not written yet cannot be dropped
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

    @property
    def bystanders(self) -> set[int]:
        """The servers' processes, whose CPU time belongs to no loader."""
        return {gateway.pid for gateway in self._gateways.values()} | ({self._server.pid} if self._server else set())

    def _is_served(self, setting: TurnSetting) -> bool:
        return self._shards.store.cluster is not None or setting.latency_ms is not None

    def _key(self, setting: TurnSetting) -> tuple[object, ...]:
        """Equal for settings that read the same data set."""
        return setting.shards, setting.photo_side, self._is_served(setting)

    def _make(self, setting: TurnSetting) -> ShardSet:
        shards = self._shards
        if (setting.shards, setting.photo_side, self._num_samples) != (None, None, None):
            shards = repeat_shards(
                shards,
                directory=self._folder.new(),
                num_samples=self._num_samples,
                num_shards=setting.shards,
                photo_side=setting.photo_side,
                photo=self._options.photo,
                mask=self._options.mask,
            )
        if self._is_served(setting) and shards.store.directory is not None:
            if self._server is None:
                self._server = self._stack.enter_context(embedded_node.start(self._folder.new()))
            shards = upload_shards(shards, self._server.endpoint, f"{BUCKET}-{len(self._sets)}")
        if shards is self._shards and shards.store.directory is not None and find_manifest(shards) is None:
            # Link shards and class table into a directory where their index can be written once, for all loaders.
            store = LocalStore(self._folder.new())
            for name in (*shards.names, classes_name(shards.prefix)):
                if (source := Path(shards.store.locate(name))).exists():
                    target = Path(store.locate(name))
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.symlink_to(source.resolve())
            shards = ShardSet(store=store, names=shards.names)
        if shards is not self._shards:
            index_shards(shards)
        return shards

    def _describe(self, shards: ShardSet) -> DataFacts:
        found = IndexedSet(shards)
        components = ";".join(filter(None, (self._options.photo, self._options.mask, LABEL_COMPONENT))).split(";")
        sizes = [index.sizes[name] for _, index in found.each() for name in components if name in index.sizes]
        return DataFacts(
            num_samples=found.manifest.num_samples,
            num_shards=len(shards.names),
            shard_bytes=found.manifest.total_bytes,
            needed_bytes=sum(int(column.sum()) for column in sizes),
            digest=found.manifest.digest,
        )
