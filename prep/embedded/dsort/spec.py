"""Check a client's dSort request.

AIS 4.9 closes the connection on an unknown algorithm, a bad size or a bad output template; the node answers 400.
"""

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dali_pipes.store.shard_names import EXTENSIONS, extension_of
from dali_pipes.store.templates import Template
from prep.embedded import wire
from prep.embedded.wire import RefusalError
from prep.shuffle.dsort_spec import parse_size
from prep.shuffle.order import Algorithm


@dataclass(frozen=True, kw_only=True)
class SortSpec:
    """A checked dSort request."""

    source: str
    target: str
    inputs: Template | list[str]
    input_extension: str
    outputs: Template | None
    """``None`` if the key map names the shards."""
    output_extension: str
    output_shard_size: int
    algorithm: Algorithm
    key_map: str
    """URL of an external key map, or empty."""
    key_map_separator: str
    description: str

    @classmethod
    def parse(cls, spec: dict[str, Any]) -> "SortSpec":
        """Check a request's JSON; raises `RefusalError`."""
        try:
            return cls._parse(spec)
        except ValueError as exc:
            raise RefusalError(400, f"[dsort] parse-spec: {exc}") from exc

    @classmethod
    def _parse(cls, spec: dict[str, Any]) -> "SortSpec":
        source, target = (_bucket(spec.get(name)) for name in ("input_bck", "output_bck"))
        if not source:
            raise ValueError('"input_bck" missing source bucket')
        key_map = wire.field_of(spec, "ekm_file", str)
        try:
            size = parse_size(str(spec.get("output_shard_size") or "0"))
        except ValueError as exc:
            raise ValueError(f'"output_shard_size": {exc}') from exc
        if key_map and not size:
            raise ValueError('"output_shard_size" must be set with an "ekm_file"')
        input_format = wire.field_of(spec, "input_format", dict)
        names = wire.field_of(input_format, "objnames", list)
        if not all(isinstance(name, str) for name in names):
            raise ValueError('"objnames" must hold names')
        template = wire.field_of(input_format, "template", str)
        input_extension = _extension(spec, "input_extension") or extension_of(template) or ".tar"
        output_format = wire.field_of(spec, "output_format", str)
        output_extension = _extension(spec, "output_extension") or extension_of(output_format) or input_extension
        return cls(
            source=source,
            target=target or source,
            inputs=names or Template.parse(template),
            input_extension=input_extension,
            outputs=None if key_map else _outputs(output_format, output_extension),
            output_extension=output_extension,
            output_shard_size=size,
            algorithm=_algorithm(wire.field_of(spec, "algorithm", dict)),
            key_map=key_map,
            key_map_separator=wire.field_of(spec, "ekm_file_sep", str),
            description=str(spec.get("description") or ""),
        )

    def input_names(self) -> Iterator[str]:
        """Yield the names of the input shards."""
        if isinstance(self.inputs, list):
            return iter(self.inputs)
        return (with_extension(name, self.input_extension) for name in self.inputs.names())


def with_extension(name: str, extension: str) -> str:
    """Add the extension to a name that does not end with it."""
    return name if name.endswith(extension) else f"{name}{extension}"


def _algorithm(fields: dict[str, Any]) -> Algorithm:
    kind, seed = fields.get("kind") or "alphanumeric", str(fields.get("seed") or "")
    if kind == "md5":
        raise wire.unsupported("dSort by md5")
    if not re.fullmatch(r"\d{0,19}", seed):
        raise ValueError(f'invalid seed "{seed}" (expecting integer value)')
    is_content = kind == "content"
    extension = fields.get("extension")
    if is_content and not (isinstance(extension, str) and re.fullmatch(r"\s*\..*\S\s*", extension)):
        raise ValueError(f'invalid extension "{extension}" of the algorithm (expecting e.g. ".cls")')
    return Algorithm(
        kind=kind,
        seed=int(seed or time.time_ns()) if kind == "shuffle" else 0,
        decreasing=fields.get("decreasing") is True and kind in ("alphanumeric", "content"),
        component=str(extension) if is_content else "",
        key_type=str(fields.get("content_key_type")) if is_content else "string",
    )


def _outputs(text: str, extension: str) -> Template:
    outputs = Template.parse(text.strip())
    if not len(outputs):
        raise ValueError("prefix-only template not supported: output_format needs a range of numbers in braces")
    for name in outputs.ends():  # the names between the first and the last have the same parts
        wire.check_object_name(with_extension(name, extension))
    return outputs


def _extension(spec: dict[str, Any], name: str) -> str:
    text = wire.field_of(spec, name, str)
    extension = f".{text.removeprefix('.')}" if text else ""
    if extension and extension not in EXTENSIONS:
        raise wire.unsupported(f"dSort with {name} {text!r}")
    return extension


def _bucket(model: object) -> str:
    if not isinstance(model, dict) or not model.get("name"):
        return ""
    if model.get("provider") not in (None, "", "ais"):
        raise wire.unsupported(f"dSort of {model['provider']}:// buckets")
    wire.check_bucket_name(str(model["name"]))
    return str(model["name"])
