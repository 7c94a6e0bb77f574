"""Say what a shuffle is to do, by options or by a dSort spec; all of it is checked before anything is read.

A cluster checks little of a spec: a job whose template has no range reads nothing and "succeeds", a bad size closes the
connection, an unknown field is ignored.
"""

import hashlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec

from dali_pipes.data_set.named import list_shards
from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import read_json
from dali_pipes.store.base import Store
from dali_pipes.store.cloud.objects import CloudObjects
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.http.answers import ObjectRequest
from dali_pipes.store.http.client import HttpAccess, without_password
from dali_pipes.store.http.objects import ObjectFetcher
from dali_pipes.store.patience import IMPATIENT
from dali_pipes.store.shard_names import (
    EXTENSIONS,
    MAX_EXPANDED,
    BucketParts,
    Template,
    check_object_name,
    extension_of,
)
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import is_remote, open_store
from prep.part import ALL, JobPart
from prep.shuffle.key_map import Grouping, KeyMap, parse_key_map
from prep.shuffle.order import Algorithm
from prep.workers import WorkersKind

Engine = Literal["auto", "dsort", "exchange"]

# A key map of a million keys takes about 30 MB.
_MAX_KEY_MAP_BYTES = 1 << 30
_DESCRIPTION = "dali-pipes prep shuffle"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_PROVIDERS = {"ais": "ais", "aws": "aws", "s3": "aws", "gcp": "gcp", "gs": "gcp", "azure": "azure", "az": "azure"}


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
    description: str = _DESCRIPTION
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of a dSort spec that do not change the output; they are sent unchanged."""

    def __post_init__(self) -> None:
        if self.outputs is None:
            # A rule adds the name of a class, a folder or a split.
            adds_name = isinstance(self.mapped, Grouping) and self.mapped.by != "balanced"
            prefix = f"{self.output_prefix}{'x-' if adds_name else ''}"
            if not re.fullmatch(r"[^{}\s]*[^{}\s/0-9]", prefix):
                raise ValueError(
                    "a prefix must not hold braces or white space, and end in a name's start that is not a digit, such "
                    f"as 'shuffled-', got '{prefix}'"
                )
            check_object_name(prefix, url=f"{self.output_store.url}/{prefix}")
        object.__setattr__(self, "extension", self.extension or self.input_extension)
        if self.engine not in get_args(Engine):
            raise ValueError(f"engine must be one of {', '.join(get_args(Engine))}, got '{self.engine}'")
        if self.extension not in EXTENSIONS:
            raise ValueError(f"extension must be one of {', '.join(EXTENSIONS)}, got '{self.extension}'")
        if self.shard_bytes is not None and self.shard_bytes < 1:
            raise ValueError(f"shard_bytes must be positive, got {self.shard_bytes}")
        if self.drop_unmapped and not isinstance(self.mapped, KeyMap):
            raise ValueError("drop_unmapped leaves out samples that a key map does not name; no key map is given")
        asked = f"--on {self.on}" if self.on != "processes" else "" if self.part.is_all else f"--part {self.part}"
        if asked and self.engine == "dsort":
            raise ValueError(f"{asked} goes with --engine exchange, not with --engine dsort")
        if asked and self.input_extension != ".tar":
            raise ValueError(f"compressed shards are unpacked on one machine: drop {asked}")
        if self.engine == "dsort" and self.is_local:
            raise ValueError(
                f"'{self.shards.store.url}' is not in AIStore; engine 'dsort' runs in an AIStore cluster: use --engine "
                "exchange, or pack the shards into ais://BUCKET"
            )
        for template in self.mapped.outputs if isinstance(self.mapped, KeyMap) else filter(None, [self.outputs]):
            for end in template.ends():
                check_object_name(end, url=self.output_store.locate(end))

    @property
    def is_exchange(self) -> bool:
        """Whether it is sure before the plan that workers exchange the samples."""
        is_shared = self.on != "processes" or not self.part.is_all
        return self.engine == "exchange" or (self.engine == "auto" and (is_shared or self.is_local))

    @property
    def input_extension(self) -> str:
        """The extension of all input shards; raises `ValueError` if they differ, or one has no known extension."""
        found = {extension_of(name): name for name in self.shards.names}
        if "" in found or not found:
            raise ValueError(f"shards must all end in one of {', '.join(EXTENSIONS)}, got '{found.get('', '')}'")
        if len(found) > 1:
            raise ValueError(f"shards must all end alike, got {' and '.join(sorted(found))}")
        return next(iter(found))

    @property
    def output_store(self) -> Store:
        return self.target or self.shards.store

    @property
    def prefix(self) -> str:
        """The beginning of the output's names."""
        return self.output_prefix if self.outputs is None else self.outputs.prefix

    @property
    def is_local(self) -> bool:
        """Whether input or output is in no cluster, so that no cluster can do it."""
        return self.shards.store.cluster is None or self.output_store.cluster is None

    @property
    def needs_labels(self) -> bool:
        """Whether samples are grouped by class."""
        return isinstance(self.mapped, Grouping) and self.mapped.by in ("class", "balanced")


def common_prefix(names: Sequence[str]) -> str:
    """The beginning of all names, digits included."""
    return os.path.commonprefix(names)  # noqa: RUF071 (by character is what is meant)


def epoch_seed(seed: int, epoch: int) -> int:
    """The seed of an epoch.

    >>> epoch_seed(0, 1), epoch_seed(0, 2), epoch_seed(1, 1)
    (8372147079113586533, 6049555782909542890, 1066406101564956322)
    """
    return int.from_bytes(hashlib.blake2b(f"{seed}/epoch/{epoch}".encode(), digest_size=8).digest()) >> 1


def epoch_prefix(prefix: str, epoch: int) -> str:
    """The prefix of an epoch's shards. It does not start with ``prefix``, which still names one set.

    >>> epoch_prefix("train/shuffled-", 1)
    'train/e000001-shuffled-'
    """
    folder, slash, base = prefix.rpartition("/")
    return f"{folder}{slash}e{epoch:06d}-{base}"


# Specs


class BucketName(msgspec.Struct, forbid_unknown_fields=True):
    """A bucket, with the fields that dSort's requests have."""

    name: str = ""
    provider: str = "ais"
    namespace: dict[str, str] | None = None

    @property
    def bucket(self) -> str:
        """The bucket's name after its namespace, as URLs have it."""
        uuid, name = ((self.namespace or {}).get(part, "") for part in ("uuid", "name"))
        return BucketParts(self.name, uuid, name).text

    def check(self, where: str) -> None:
        """Bring the provider into AIStore's form; refuse an unknown one, and an odd namespace."""
        if self.namespace and self.namespace.keys() - {"uuid", "name"}:
            raise ValueError(f"{where}.namespace must have the fields uuid and name, got {self.namespace!r:.60}")
        provider = self.provider.removesuffix("://") or "ais"
        if provider not in _PROVIDERS:
            raise ValueError(f"{where}.provider must be one of {', '.join(_PROVIDERS)}, got '{self.provider}'")
        self.provider = _PROVIDERS[provider]


class _Inputs(msgspec.Struct, forbid_unknown_fields=True):
    template: str = ""
    objnames: list[str] = []


class _Algorithm(msgspec.Struct, forbid_unknown_fields=True):
    kind: str = "alphanumeric"
    decreasing: bool = False
    seed: str | int = ""
    extension: str = ""
    content_key_type: str = "string"


class _Spec(msgspec.Struct, forbid_unknown_fields=True):
    """The fields of a spec, as AIStore names them."""

    input_bck: BucketName = msgspec.field(default_factory=BucketName)
    input_format: _Inputs = msgspec.field(default_factory=_Inputs)
    input_extension: str = ""
    output_bck: BucketName = msgspec.field(default_factory=BucketName)
    output_format: str = ""
    output_extension: str = ""
    output_shard_size: str | int = ""
    algorithm: _Algorithm = msgspec.field(default_factory=_Algorithm)
    ekm_file: str = ""
    ekm_file_sep: str = ""
    description: str = _DESCRIPTION
    dry_run: bool = False


# Settings of the cluster.
_SETTINGS = ("max_mem_usage", "extract_concurrency_max_limit", "create_concurrency_max_limit", "dsorter_type", "Config")


@dataclass(frozen=True, kw_only=True)
class DsortSpec:
    """What a spec asks for."""

    source: BucketName
    target: BucketName
    inputs: Template | tuple[str, ...]
    """A template without extension, or full names. A template without a range is a prefix."""
    input_extension: str
    outputs: Template | None
    """A template without extension; ``None``: a key map names the shards."""
    ekm_file: str
    """URL of an external key map; may be empty."""
    ekm_file_sep: str
    dry_run: bool
    options: Mapping[str, Any]
    """Further fields of the `Request`."""

    @property
    def input_names(self) -> tuple[str, ...]:
        """The names that the spec stands for; raises `ValueError` for more than `MAX_EXPANDED`."""
        if not isinstance(self.inputs, Template):
            return self.inputs
        if len(self.inputs) > MAX_EXPANDED:
            raise ValueError(f"input_format.template '{self.inputs}' stands for more than {MAX_EXPANDED:,} shards")
        return tuple(f"{stem}{self.input_extension}" for stem in self.inputs.names())


def read_spec(path: Path) -> DsortSpec:
    """Read a spec file as ``ais start dsort -f`` does: as JSON or YAML, by the file's extension.

    Raises:
        DataError: If the file is neither, or has an unknown field, or a size, template or algorithm that dSort would
            refuse or misread.
        StoreError: If the file cannot be read.
    """
    import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

    kind = "JSON" if path.suffix.lower() == ".json" else "YAML"
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise StoreError(f"cannot read spec '{path}': {getattr(exc, 'strerror', None) or exc}") from exc
    try:
        found = read_json(text) if kind == "JSON" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as exc:
        raise DataError(f"spec '{path}' is not {kind}: {' '.join(str(exc).split())[:200]}") from exc
    if not isinstance(found, dict):
        raise DataError(f"spec '{path}': expected fields such as input_bck, got {type(found).__name__}")
    try:
        return parse_spec(found)
    except ValueError as exc:
        raise DataError(f"spec '{path}': {exc}") from exc


def parse_spec(fields: Mapping[str, Any]) -> DsortSpec:
    """Check a spec. Raises `ValueError` where `read_spec` raises `DataError`."""
    given = {
        name: {key: value for key, value in part.items() if value not in (None, "")} if isinstance(part, dict) else part
        for name, part in fields.items()
        if part is not None and part != ""
    }
    settings = {name: given.pop(name) for name in _SETTINGS if name in given}
    try:
        spec = msgspec.convert(given, _Spec)
    except msgspec.ValidationError as exc:
        raise ValueError(str(exc)) from None
    spec.input_bck.check("input_bck")
    spec.output_bck.check("output_bck")
    if not spec.input_bck.name:
        raise ValueError("input_bck.name is missing: the bucket that holds the shards")
    shard_bytes = None
    if spec.output_shard_size != "":
        shard_bytes = parse_size(str(spec.output_shard_size), what="output_shard_size") or None
    if spec.ekm_file and shard_bytes is None:
        raise ValueError("output_shard_size is missing: with an ekm_file it must be set")
    inputs, input_extension = _inputs(spec)
    outputs, output_extension = _template(spec.output_format, spec.output_extension, what="output")
    if not spec.ekm_file and not len(outputs):
        raise ValueError(
            "output_format must hold a range of numbers, such as 'shuffled-{000000..000999}', got "
            f"'{spec.output_format}'"
        )
    return DsortSpec(
        source=spec.input_bck,
        target=spec.output_bck if spec.output_bck.name else spec.input_bck,
        inputs=inputs,
        input_extension=input_extension,
        outputs=None if spec.ekm_file else outputs,
        ekm_file=spec.ekm_file,
        ekm_file_sep=spec.ekm_file_sep,
        dry_run=spec.dry_run,
        options={
            "algorithm": _algorithm(spec.algorithm),
            "shard_bytes": shard_bytes,
            "extension": output_extension or input_extension,
            "description": spec.description,
            "settings": settings,
        },
    )


def parse_size(text: str, *, what: str) -> int:
    """Parse bytes as AIS does: ``4KB`` and ``4KiB`` are 4,096. Raises `ValueError` for other texts."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)I?B?", text.strip().upper())
    if match is None:
        raise ValueError(
            f"{what}: a size is a number that is not negative, in KiB, MiB, GiB or TiB, such as 4MiB, got '{text}'"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def _algorithm(part: _Algorithm) -> Algorithm:
    if not re.fullmatch(r"[0-9]{0,19}", str(part.seed)):
        raise ValueError(f"algorithm.seed must be a whole number, not negative, got {part.seed!r:.60}")
    if part.kind == "shuffle" and part.seed == "":
        raise ValueError("algorithm.seed is missing: without a seed the same shards cannot be made again")
    return Algorithm(
        kind=part.kind,
        seed=int(part.seed or 0) if part.kind == "shuffle" else 0,
        decreasing=part.decreasing,
        component=part.extension,
        key_type=part.content_key_type,
    )


def _inputs(spec: _Spec) -> tuple[Template | tuple[str, ...], str]:
    names, template = spec.input_format.objnames, spec.input_format.template
    if bool(names) == bool(template):
        raise ValueError("input_format must have either template or objnames")
    found, extension = _template(template, spec.input_extension, what="input")
    if names:
        return tuple(names), extension or extension_of(names[0]) or ".tar"
    return found, extension or ".tar"


def _template(text: str, extension: str, *, what: str) -> tuple[Template, str]:
    """The template without its extension, and the extension, which may be a field of its own."""
    extension = f".{extension.removeprefix('.')}" if extension else ""
    if extension and extension not in EXTENSIONS:
        raise ValueError(f"{what}_extension must be one of {', '.join(EXTENSIONS)}, got '{extension}'")
    what = "input_format.template" if what == "input" else "output_format"
    if text.count("{") != text.count("}"):
        raise ValueError(f"{what} '{text}' has braces without a pair; dSort would read nothing")
    found = extension_of(text)
    if found and extension and found != extension:
        raise ValueError(f"{what} '{text}' ends in {found}, but the extension field says {extension}")
    try:
        return Template.parse(text.removesuffix(found)), found or extension
    except ValueError as exc:
        raise ValueError(f"{what}: {exc}") from exc


def request_of_spec(spec: DsortSpec, *, endpoint: str, **options: Any) -> Request:
    """The request that a dSort spec describes; ``options`` are fields that a spec does not have, and ``dry_run``."""
    store, target = (AisStore(endpoint, place.bucket, provider=place.provider) for place in (spec.source, spec.target))
    mapped = None
    if spec.ekm_file:
        extension = spec.options["extension"]
        mapped = load_key_map(spec.ekm_file, endpoint=endpoint, separator=spec.ekm_file_sep, extension=extension)
    if isinstance(spec.inputs, Template) and not len(spec.inputs):
        # A cluster would accept a prefix and read nothing; here a prefix stands for its shards.
        shards = list_shards(store.locate(spec.inputs.prefix), endpoint=endpoint, compressed=True)
    else:
        shards = ShardSet(store=store, names=spec.input_names)
    return Request(
        shards,
        target=target if spec.target != spec.source else None,
        outputs=spec.outputs,
        mapped=mapped,
        **spec.options,
        **{**options, "dry_run": spec.dry_run or options.get("dry_run", False)},
    )


def load_key_map(where: str, *, endpoint: str | None, separator: str = "", extension: str = ".tar") -> KeyMap:
    """Read an external key map from a file, an object (``ais://...``) or a URL; see `parse_key_map`."""
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
            return objects.read(url, max_bytes=_MAX_KEY_MAP_BYTES)
    except StoreError as exc:
        raise StoreError(f"cannot read key map: {exc}") from None
