"""Run dSort jobs on a cluster; write their requests as AIStore's JSON, and read them from spec files.

A cluster checks little: a job whose template has no range reads nothing and "succeeds", a bad size closes the
connection, an unknown field is ignored. So everything is checked here, before it is sent.
"""

import contextlib
import json
import re
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import msgspec

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import read_json
from dali_pipes.progress import bar
from dali_pipes.store.base import Bucket
from dali_pipes.store.messages import error_text
from dali_pipes.store.shard_names import EXTENSIONS, Template, extension_of
from prep.shuffle.order import Algorithm

if TYPE_CHECKING:
    from aistore.sdk.dsort.core import Dsort


# Seconds between two questions about a job: at first, and at most; the pause doubles.
_POLL_S = (0.05, 1.0)
# Part of a message of a job that this cluster cannot do -> the reason.
_REASONS = {
    "requesting ekm file": "its targets cannot read the key map",
    # The input was checked: each sample has the component. So a shard calls it 'CLS', which dSort does not find.
    "key is missing for": "dSort distinguishes component 'CLS' from 'cls'",
}
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class BucketName:
    """A bucket, with the fields that dSort's requests have."""

    name: str
    provider: str = "ais"


@dataclass(frozen=True, kw_only=True)
class DsortSpec:
    """A request to dSort."""

    source: BucketName
    target: BucketName
    inputs: Template | tuple[str, ...]
    """A template without extension, or full names. A template without a range is a prefix."""
    input_extension: str = ".tar"
    outputs: Template | None
    """A template without extension; ``None``: a key map names the shards."""
    output_extension: str = ".tar"
    shard_bytes: int | None
    """Bytes of an output shard; ``None``: the input is spread over all names."""
    algorithm: Algorithm
    ekm_file: str = ""
    """URL of an external key map."""
    ekm_file_sep: str = ""
    description: str = "dali-pipes prep shuffle"
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the cluster; they are sent unchanged."""
    dry_run: bool = False

    def json(self) -> dict[str, Any]:
        """The request in AIStore's fields. The seed is a text, because AIS closes the connection on a number."""
        algorithm: dict[str, Any] = {"kind": self.algorithm.kind}
        if self.algorithm.kind == "shuffle":
            algorithm["seed"] = str(self.algorithm.seed)
        elif self.algorithm.kind != "none":
            algorithm["decreasing"] = self.algorithm.decreasing
        if self.algorithm.kind == "content":
            algorithm |= {"extension": f".{self.algorithm.component}", "content_key_type": self.algorithm.key_type}
        inputs: dict[str, Any] = (
            {"template": str(self.inputs)} if isinstance(self.inputs, Template) else {"objnames": list(self.inputs)}
        )
        return {
            "description": self.description,
            "input_bck": asdict(self.source),
            "input_format": inputs,
            "input_extension": self.input_extension,
            "output_bck": asdict(self.target),
            "output_format": "" if self.outputs is None else str(self.outputs),
            "output_extension": self.output_extension,
            **({} if self.shard_bytes is None else {"output_shard_size": f"{self.shard_bytes}B"}),
            "algorithm": algorithm,
            **({"ekm_file": self.ekm_file, "ekm_file_sep": self.ekm_file_sep} if self.ekm_file else {}),
            **self.settings,
        }


def read_spec(path: Path) -> DsortSpec:
    """Read a spec file as ``ais start dsort -f`` does: as JSON or YAML, by the file's extension.

    Raises:
        DataError: If the file is neither, or has an unknown field, or a size, template or algorithm that dSort would
            refuse or misread.
        StoreError: If the file cannot be read.
    """
    import yaml  # type: ignore[import-untyped]  # its stubs are a package of their own

    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise StoreError(f"cannot read spec '{path}': {getattr(exc, 'strerror', None) or exc}") from exc
    try:
        found = read_json(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as exc:
        what = " ".join(str(exc).split())[:200]
        raise DataError(f"spec '{path}' is not {'JSON' if path.suffix.lower() == '.json' else 'YAML'}: {what}") from exc
    if not isinstance(found, dict):
        raise DataError(f"spec '{path}': expected fields such as input_bck, got {type(found).__name__}")
    try:
        return parse_spec(found)
    except ValueError as exc:
        raise DataError(f"spec '{path}': {exc}") from exc


class _Bucket(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    provider: str = "ais"
    namespace: Any = None


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

    input_bck: _Bucket = msgspec.field(default_factory=_Bucket)
    input_format: _Inputs = msgspec.field(default_factory=_Inputs)
    input_extension: str = ""
    output_bck: _Bucket = msgspec.field(default_factory=_Bucket)
    output_format: str = ""
    output_extension: str = ""
    output_shard_size: str | int = ""
    algorithm: _Algorithm = msgspec.field(default_factory=_Algorithm)
    ekm_file: str = ""
    ekm_file_sep: str = ""
    description: str = ""
    dry_run: bool = False


# Settings of the cluster, which do not change the output; they are sent unchanged.
_SETTINGS = ("max_mem_usage", "extract_concurrency_max_limit", "create_concurrency_max_limit", "dsorter_type", "Config")


def parse_spec(spec: Mapping[str, Any]) -> DsortSpec:
    """Check a spec. Raises `ValueError` where `read_spec` raises `DataError`."""
    given = {
        name: {key: value for key, value in part.items() if value is not None and value != ""}
        if isinstance(part, dict)
        else part
        for name, part in spec.items()
        if part is not None and part != ""
    }
    settings = {name: given.pop(name) for name in _SETTINGS if name in given}
    try:
        found = msgspec.convert(given, _Spec)
    except msgspec.ValidationError as exc:
        raise ValueError(str(exc)) from None
    source = _bucket(found.input_bck, "input_bck")
    if source is None:
        raise ValueError("input_bck.name is missing: the bucket that holds the shards")
    inputs, input_extension = _inputs(found)
    shard_bytes = None
    if found.output_shard_size != "":
        try:
            shard_bytes = parse_size(str(found.output_shard_size)) or None
        except ValueError as exc:
            raise ValueError(f"output_shard_size: {exc}") from exc
    if found.ekm_file and shard_bytes is None:
        raise ValueError("output_shard_size is missing: with an ekm_file it must be set")
    outputs, output_extension = _outputs(found, default=input_extension)
    return DsortSpec(
        source=source,
        target=_bucket(found.output_bck, "output_bck") or source,
        inputs=inputs,
        input_extension=input_extension,
        outputs=outputs,
        output_extension=output_extension,
        shard_bytes=shard_bytes,
        algorithm=_algorithm(found.algorithm),
        ekm_file=found.ekm_file,
        ekm_file_sep=found.ekm_file_sep,
        description=found.description,
        settings=settings,
        dry_run=found.dry_run,
    )


def parse_size(text: str) -> int:
    """Parse bytes as AIS does: ``4KB`` and ``4KiB`` are 4,096. Raises `ValueError` for other texts."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)I?B?", text.strip().upper())
    if match is None:
        raise ValueError(
            f"a size is a number that is not negative, in KiB, MiB, GiB or TiB, such as 4MiB, got '{text}'"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def _bucket(part: _Bucket, name: str) -> BucketName | None:
    if part.namespace:
        raise ValueError(f"{name}.namespace: namespaces are not supported, got {part.namespace!r:.60}")
    providers = {"ais": "ais", "aws": "aws", "s3": "aws", "gcp": "gcp", "gs": "gcp", "azure": "azure", "az": "azure"}
    provider = providers.get(part.provider.removesuffix("://") or "ais")
    if provider is None:
        raise ValueError(f"{name}.provider must be one of {', '.join(providers)}, got '{part.provider}'")
    return BucketName(part.name, provider) if part.name else None


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
    extension = _extension(spec.input_extension, what="input_extension")
    if bool(names) == bool(template):
        raise ValueError("input_format must have either template or objnames")
    if names:
        found = {extension_of(name) for name in names}
        return tuple(names), extension or (min(found) if len(found) == 1 else "") or ".tar"
    stem, extension = _split(template, extension, what="input_format.template")
    return _parsed(stem, what="input_format.template"), extension or ".tar"


def _outputs(spec: _Spec, *, default: str) -> tuple[Template | None, str]:
    text, extension = spec.output_format, _extension(spec.output_extension, what="output_extension")
    stem, extension = _split(text, extension, what="output_format")
    if spec.ekm_file:
        return None, extension or default
    outputs = _parsed(stem, what="output_format")
    if not len(outputs):
        raise ValueError(
            f"output_format must hold a range of numbers, such as 'shuffled-{{000000..000999}}', got '{text}'"
        )
    return outputs, extension or default


def _extension(text: str, *, what: str) -> str:
    extension = f".{text.removeprefix('.')}" if text else ""
    if extension and extension not in EXTENSIONS:
        raise ValueError(f"{what} must be one of {', '.join(EXTENSIONS)}, got '{text}'")
    return extension


def _split(text: str, extension: str, *, what: str) -> tuple[str, str]:
    """The stem and the extension of a template."""
    found = extension_of(text)
    if found and extension and found != extension:
        raise ValueError(f"{what} '{text}' ends in {found}, but the extension field says {extension}")
    return text.removesuffix(found), found or extension


def _parsed(text: str, *, what: str) -> Template:
    if text.count("{") != text.count("}"):
        raise ValueError(f"{what} '{text}' has braces without a pair; dSort would read nothing")
    try:
        return Template.parse(text)
    except ValueError as exc:
        raise ValueError(f"{what}: {exc}") from exc


class NoDsortError(StoreError):
    """The cluster's dSort cannot do the job, but another engine can."""


def run_job(
    store: Bucket,
    spec: Mapping[str, Any],
    *,
    key_map: bytes | None,
    key_map_name: str,
    clear: Callable[[], None],
    num_input_shards: int,
    show_progress: bool,
) -> None:
    """Start the job and wait for it; if it fails, abort it and delete its output.

    Args:
        store: The input's bucket.
        spec: The request.
        key_map: An external key map, as JSON; it is stored in the bucket while the job runs.
        key_map_name: The key map's name in the bucket.
        clear: Deletes the job's output.
        num_input_shards: The total of the progress bar.
        show_progress: Draw a bar.

    Raises:
        NoDsortError: If the cluster cannot start the job, or cannot read the key map.
        StoreError: If the job fails.
    """
    dsort = store.client.dsort()
    try:
        if key_map is not None:
            spec = {**spec, "ekm_file": _put_key_map(store, key_map_name, key_map)}
        _start(store, dsort, spec)
        _wait(store, dsort, num_input_shards=num_input_shards, show_progress=show_progress)
    except BaseException:
        with contextlib.suppress(StoreError):
            if dsort.dsort_id:
                with store.asking(store.url):
                    dsort.abort()
        with contextlib.suppress(StoreError):
            clear()
        raise
    finally:
        if key_map is not None:
            with contextlib.suppress(StoreError):
                store.delete(key_map_name)


def _put_key_map(store: Bucket, name: str, data: bytes) -> str:
    """Store a key map; returns a URL at which the cluster's targets can read it.

    Targets send the headers of cluster nodes. If the cluster has internal networks, a node's public port refuses such
    requests with 403 (AIS 4.9; the SDK gives the URL of the proxy's public port). So the URL names the target that
    holds the object, in the cluster's internal network.
    """
    store.write(name, data)
    bucket = store.client.bucket(store.bucket, provider=store.provider)
    with store.asking(store.locate(name)):
        head = bucket.client.request(
            "HEAD", path=f"objects/{store.bucket}/{quote(name)}", params={**bucket.qparam, "props": "location"}
        )
        nodes = store.client.cluster().get_info().tmap
    found = re.match(r"t\[([^\]]+)\]", head.headers.get("Ais-Location", ""))
    if found is None or found[1] not in nodes:
        raise NoDsortError(f"no target at {store.endpoint} reports that it holds the key map '{store.locate(name)}'")
    url = nodes[found[1]].intra_data_net.direct_url
    return f"{url}/v1/objects/{store.bucket}/{quote(name)}?provider={bucket.qparam['provider']}"


def _start(store: Bucket, dsort: "Dsort", spec: Mapping[str, Any]) -> None:
    from aistore.sdk.errors import AISError, ErrBckNotFound

    with tempfile.TemporaryDirectory(prefix="dali-pipes-shuffle-") as folder:
        path = Path(folder) / "dsort.json"
        path.write_text(json.dumps(spec))
        with store.asking(store.url):
            try:
                dsort.start(path)
            except ErrBckNotFound:
                raise
            except AISError as exc:
                # 400: AIS 5.0, whose own broadcast fails. 404, 405, 501: built without dSort.
                if exc.status_code not in (400, 404, 405, 501):
                    raise
                raise NoDsortError(
                    f"no dSort that works at {store.endpoint}: {error_text(exc)}; it needs an AIStore built with "
                    "dSort, 4.x (5.0 has it and cannot start it). Without it, shuffle from here: --engine exchange"
                ) from exc


def _wait(store: Bucket, dsort: "Dsort", *, num_input_shards: int, show_progress: bool) -> None:
    pause, longest = _POLL_S
    with bar(what="dSort reads", total=num_input_shards, unit="shards", shown=show_progress) as drawn:
        while True:
            with store.asking(store.url):
                jobs = list(dsort.get_job_info().values())
            failures = [text for job in jobs for text in job.metrics.errors or () if text]
            if failures or any(job.metrics.aborted or job.aborted for job in jobs):
                # Most nodes only report that another one failed.
                causes = [text for text in failures if not text.endswith(" aborted")] or failures
                reason = causes[0] if causes else "aborted"
                text = f"dSort job '{dsort.dsort_id}' at {store.endpoint} failed: {reason}"
                if why := next((why for said, why in _REASONS.items() if said in reason), None):
                    raise NoDsortError(f"{text}; {why}. Shuffle from here: --engine exchange")
                raise StoreError(text)
            drawn.update(sum(int(job.metrics.local_extraction.extracted_count) for job in jobs) - drawn.n)
            if jobs and all(job.metrics.shard_creation.finished for job in jobs):
                return
            time.sleep(pause)
            pause = min(2 * pause, longest)
