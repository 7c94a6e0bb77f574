"""Read a dSort request: JSON in, a checked spec out; names with number ranges in, single names out."""

import itertools
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prep.embedded import wire
from prep.embedded.wire import RefusalError

_MAX_DIGITS = 18  # of a number in a template: it stays below 2**63
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


@dataclass(frozen=True)
class Template:
    """Names with number ranges in braces: ``train-{000..127}``, ``a-{0..8..2}-b-{1..3}``."""

    parts: Sequence[str]
    """What stands between the ranges; one more than there are ranges."""
    ranges: Sequence[range]
    widths: Sequence[int]

    @classmethod
    def parse(cls, text: str) -> "Template":
        """The template; without a pair of braces it has no range, and counts no name, as in AIS.

        Raises:
            RefusalError: Braces that hold no ascending range.
        """
        if "{" not in text or "}" not in text:
            return cls([text], [], [])
        pieces = re.split(r"\{(\d+)\.\.(\d+)(?:\.\.(\d+))?\}", text)
        parts, ranges, widths = pieces[::4], [], []
        for first, last, step in zip(pieces[1::4], pieces[2::4], pieces[3::4], strict=True):
            if max(map(len, (first, last, step or ""))) > _MAX_DIGITS:
                raise RefusalError(400, f"invalid 'bash' template \"{text[:100]}\": numbers are too long")
            if int(first) > int(last) or int(step or 1) == 0:
                raise RefusalError(400, f"invalid 'bash' template \"{text}\": {{{first}..{last}}} does not ascend")
            ranges.append(range(int(first), int(last) + 1, int(step or 1)))
            widths.append(min(len(first), len(last)))
        if any("{" in part or "}" in part for part in parts):
            raise RefusalError(
                400, f"invalid 'bash' template \"{text}\" (expecting e.g. 'prefix-{{0001..0010..1}}-suffix')"
            )
        if math.prod(map(len, ranges)) >= 1 << 63:
            raise RefusalError(400, f"invalid 'bash' template \"{text[:100]}\": too many names")
        return cls(parts, ranges, widths)

    def __len__(self) -> int:
        """How many names."""
        return math.prod(len(numbers) for numbers in self.ranges) if self.ranges else 0

    def ends(self) -> list[str]:
        """The first and the last name; none where there is no range."""
        if not self.ranges:
            return []
        return [self._filled(tuple(numbers[position] for numbers in self.ranges)) for position in (0, -1)]

    def names(self) -> Iterator[str]:
        """The names, the last range running fastest."""
        if self.ranges:
            for numbers in itertools.product(*self.ranges):
                yield self._filled(numbers)

    def _filled(self, numbers: Sequence[int]) -> str:
        filled = (f"{number:0{width}}" for number, width in zip(numbers, self.widths, strict=True))
        return self.parts[0] + "".join(text + part for text, part in zip(filled, self.parts[1:], strict=True))


@dataclass(frozen=True, kw_only=True)
class SortSpec:
    """A request to sort, checked."""

    source: str
    target: str
    inputs: Template | list[str]
    outputs: Template
    output_shard_size: int
    seed: int
    description: str

    @classmethod
    def parse(cls, spec: dict[str, Any]) -> "SortSpec":
        """Check a spec as it comes over the wire.

        AIS 4.9 breaks the connection on an unknown algorithm, a bad size or a bad output template; here the answer is
        400.
        """
        algorithm = wire.field_of(spec, "algorithm", dict)
        kind, seed = algorithm.get("kind"), str(algorithm.get("seed") or "")
        if kind in ("alphanumeric", "content", "none") or spec.get("ekm_file"):
            raise wire.unsupported(f"dSort other than shuffle (here: {'ekm_file' if spec.get('ekm_file') else kind})")
        if kind != "shuffle":
            raise RefusalError(400, f"invalid sorting algorithm {kind!r}")
        if seed and not re.fullmatch(r"\d{1,40}", seed):
            raise RefusalError(400, f'invalid seed "{seed}" (expecting integer value)')
        for extension in ("input_extension", "output_extension"):
            if spec.get(extension) not in (None, "", ".tar", "tar"):
                raise wire.unsupported(f"dSort with {extension} {spec[extension]!r}")
        source, target = (_bucket(spec.get(field_name)) for field_name in ("input_bck", "output_bck"))
        if not source:
            raise RefusalError(400, '[dsort] parse-spec: "input_bck" missing source bucket')
        outputs = Template.parse(wire.field_of(spec, "output_format", str))
        if not len(outputs):
            raise RefusalError(
                400, "prefix-only template not supported: output_format needs a range of numbers in braces"
            )
        for name in outputs.ends():  # what lies between has the same parts
            wire.check_object_name(with_extension(name))
        input_format = wire.field_of(spec, "input_format", dict)
        names = wire.field_of(input_format, "objnames", list)
        if not all(isinstance(name, str) for name in names):
            raise RefusalError(400, '[dsort] parse-spec: "objnames" must hold names')
        return cls(
            source=source,
            target=target or source,
            inputs=names or Template.parse(wire.field_of(input_format, "template", str)),
            outputs=outputs,
            output_shard_size=_parse_size(str(spec.get("output_shard_size") or "0")),
            seed=int(seed) if seed else time.time_ns(),
            description=str(spec.get("description") or ""),
        )


def _bucket(model: object) -> str:
    if not isinstance(model, dict) or not model.get("name"):
        return ""
    if model.get("provider") not in (None, "", "ais"):
        raise wire.unsupported(f"dSort of {model['provider']}:// buckets")
    wire.check_bucket_name(str(model["name"]))
    return str(model["name"])


def with_extension(name: str) -> str:
    """``name``, ending in ``.tar``."""
    return name if name.endswith(".tar") else f"{name}.tar"


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,18}(?:\.\d+)?)\s*([KMGT]?)I?B?", text.strip().upper())
    if match is None:
        raise RefusalError(400, f'[dsort] parse-spec: "output_shard_size" invalid size "{text}"')
    return int(float(match.group(1)) * _UNITS[match.group(2)])
