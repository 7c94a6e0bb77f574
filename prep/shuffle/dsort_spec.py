"""Write requests to dSort as AIStore's JSON, and read them from spec files.

A cluster checks little: a job whose template has no range reads nothing and "succeeds", a bad size closes the
connection, an unknown field is ignored. So everything is checked here, before it is sent.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dali_pipes.errors import DataError, StoreError
from dali_pipes.formats.names import read_json
from dali_pipes.store.shard_names import EXTENSIONS, extension_of
from dali_pipes.store.templates import Template
from prep.shuffle.order import Algorithm

# Fields that do not change the output; they are sent unchanged.
_SETTINGS = (
    "max_mem_usage",
    "extract_concurrency_max_limit",
    "create_concurrency_max_limit",
    "dsorter_type",
    "Config",
)
_FIELDS = (
    "input_bck",
    "input_format",
    "input_extension",
    "output_bck",
    "output_format",
    "output_extension",
    "output_shard_size",
    "algorithm",
    "ekm_file",
    "ekm_file_sep",
    "description",
    "dry_run",
    *_SETTINGS,
)
_PARTS = {
    "input_bck": ("name", "provider", "namespace"),
    "output_bck": ("name", "provider", "namespace"),
    "input_format": ("template", "objnames"),
    "algorithm": ("kind", "decreasing", "seed", "extension", "content_key_type"),
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


def parse_spec(spec: Mapping[str, Any]) -> DsortSpec:
    """Check a spec. Raises `ValueError` where `read_spec` raises `DataError`."""
    _check_fields(spec, known=_FIELDS, where="")
    for name, parts in _PARTS.items():
        _check_fields(_part(spec, name), known=parts, where=f"{name}.")
    source = _bucket(spec, "input_bck")
    if source is None:
        raise ValueError("input_bck.name is missing: the bucket that holds the shards")
    algorithm = _algorithm(_part(spec, "algorithm"))
    inputs, input_extension = _inputs(spec)
    shard_bytes = None
    if spec.get("output_shard_size") not in (None, ""):
        try:
            shard_bytes = parse_size(str(spec["output_shard_size"])) or None
        except ValueError as exc:
            raise ValueError(f"output_shard_size: {exc}") from exc
    ekm_file = _text(spec, "ekm_file")
    outputs, output_extension = _outputs(spec, ekm_file=ekm_file, default=input_extension)
    if ekm_file and shard_bytes is None:
        raise ValueError("output_shard_size is missing: with an ekm_file it must be set")
    return DsortSpec(
        source=source,
        target=_bucket(spec, "output_bck") or source,
        inputs=inputs,
        input_extension=input_extension,
        outputs=outputs,
        output_extension=output_extension,
        shard_bytes=shard_bytes,
        algorithm=algorithm,
        ekm_file=ekm_file,
        ekm_file_sep=_text(spec, "ekm_file_sep"),
        description=_text(spec, "description"),
        settings={name: spec[name] for name in _SETTINGS if name in spec},
        dry_run=_flag(spec, "dry_run", what="dry_run"),
    )


def parse_size(text: str) -> int:
    """Parse bytes as AIS does: ``4KB`` and ``4KiB`` are 4,096. Raises `ValueError` for other texts."""
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)I?B?", text.strip().upper())
    if match is None:
        raise ValueError(
            f"a size is a number that is not negative, in KiB, MiB, GiB or TiB, such as 4MiB, got '{text}'"
        )
    return int(float(match[1]) * _UNITS[match[2]])


def _check_fields(found: Mapping[str, Any], *, known: Sequence[str], where: str) -> None:
    if unknown := [str(name) for name in found if name not in known]:
        raise ValueError(f"unknown field '{where}{min(unknown)}'; known: {', '.join(known)}")


def _part(spec: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = spec.get(name)
    if part is None:
        return {}
    if not isinstance(part, dict):
        raise ValueError(f"{name} must be a mapping of {', '.join(_PARTS[name])}, got {part!r:.60}")
    return part


def _text(found: Mapping[str, Any], name: str) -> str:
    value = found.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text, got {value!r:.60}")
    return value


def _flag(found: Mapping[str, Any], name: str, *, what: str) -> bool:
    value = found.get(name, False)
    if not isinstance(value, bool):
        raise ValueError(f"{what} must be true or false, got {value!r:.60}")
    return value


def _bucket(spec: Mapping[str, Any], name: str) -> BucketName | None:
    part = _part(spec, name)
    if part.get("namespace") not in (None, "", {}):
        raise ValueError(f"{name}.namespace: namespaces are not supported, got {part['namespace']!r:.60}")
    bucket = _text(part, "name")
    provider = _text(part, "provider") or "ais"
    providers = {"ais": "ais", "aws": "aws", "s3": "aws", "gcp": "gcp", "gs": "gcp", "azure": "azure", "az": "azure"}
    if provider.removesuffix("://") not in providers:
        raise ValueError(f"{name}.provider must be one of {', '.join(providers)}, got '{provider}'")
    return BucketName(bucket, providers[provider.removesuffix("://")]) if bucket else None


def _algorithm(part: Mapping[str, Any]) -> Algorithm:
    seed = part.get("seed")
    if not re.fullmatch(r"[0-9]{0,19}", "" if seed is None else str(seed)):
        raise ValueError(f"algorithm.seed must be a whole number, not negative, got {seed!r:.60}")
    kind = _text(part, "kind") or "alphanumeric"
    if kind == "shuffle" and not str(seed if seed is not None else ""):
        raise ValueError("algorithm.seed is missing: without a seed the same shards cannot be made again")
    return Algorithm(
        kind=kind,
        seed=int(seed or 0) if kind == "shuffle" else 0,
        decreasing=_flag(part, "decreasing", what="algorithm.decreasing"),
        component=_text(part, "extension"),
        key_type=_text(part, "content_key_type") or "string",
    )


def _inputs(spec: Mapping[str, Any]) -> tuple[Template | tuple[str, ...], str]:
    part = _part(spec, "input_format")
    extension = _extension(spec, "input_extension")
    names = part.get("objnames") or []
    template = _text(part, "template")
    if not isinstance(names, list) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"input_format.objnames must be a list of names, got {names!r:.60}")
    if bool(names) == bool(template):
        raise ValueError("input_format must have either template or objnames")
    if names:
        found = {extension_of(name) for name in names}
        return tuple(names), extension or (min(found) if len(found) == 1 else "") or ".tar"
    stem, extension = _split(template, extension, what="input_format.template")
    if stem.count("{") != stem.count("}"):
        raise ValueError(f"input_format.template '{template}' has braces without a pair; dSort would read nothing")
    return _parsed(stem, what="input_format.template"), extension or ".tar"


def _outputs(spec: Mapping[str, Any], *, ekm_file: str, default: str) -> tuple[Template | None, str]:
    text = _text(spec, "output_format")
    stem, extension = _split(text, _extension(spec, "output_extension"), what="output_format")
    if ekm_file:
        return None, extension or default
    if stem.count("{") != stem.count("}"):
        raise ValueError(f"output_format '{text}' has braces without a pair")
    outputs = _parsed(stem, what="output_format")
    if not len(outputs):
        raise ValueError(
            f"output_format must hold a range of numbers, such as 'shuffled-{{000000..000999}}', got '{text}'"
        )
    return outputs, extension or default


def _extension(spec: Mapping[str, Any], name: str) -> str:
    text = _text(spec, name)
    extension = f".{text.removeprefix('.')}" if text else ""
    if extension and extension not in EXTENSIONS:
        raise ValueError(f"{name} must be one of {', '.join(EXTENSIONS)}, got '{text}'")
    return extension


def _split(text: str, extension: str, *, what: str) -> tuple[str, str]:
    """The stem and the extension of a template."""
    found = extension_of(text)
    if found and extension and found != extension:
        raise ValueError(f"{what} '{text}' ends in {found}, but the extension field says {extension}")
    return text.removesuffix(found), found or extension


def _parsed(text: str, *, what: str) -> Template:
    try:
        return Template.parse(text)
    except ValueError as exc:
        raise ValueError(f"{what}: {exc}") from exc
