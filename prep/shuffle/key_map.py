r"""Map samples to shards by their keys: external key maps (EKM), and maps made by class, folder or split.

AIS's form is ``{"cats-{000..099}.tar": ["cat/1", "^cat/[2-9]"], ...}``, template to keys, or lines of key, tab,
template. AIS treats each entry as a regular expression that may match anywhere in the name of a sample's first member:
``a/1`` also matches ``a/10.jpg``, which is an error there ("multiple matches"). Here an entry without any of
``\^$*+?()[]{}|`` is exactly a key, or exactly the name of a first member. Other entries are regular expressions as in
AIS, for samples that no exact entry names. A cluster gets a new map, with the keys that were assigned to each template.
"""

import bisect
import hashlib
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from dali_pipes.errors import DataError
from dali_pipes.formats.names import read_json
from dali_pipes.store.shard_names import Template, extension_of
from prep.shuffle.order import key_of

_RULES = ("class", "balanced", "folder", "split")
OUTPUT_DIGITS = 6
"""Digits in the names of output shards, as in those that `prep.pack` writes."""

_SPECIAL = re.compile(r"[\\^$*+?()\[\]{}|]")
# Keys in one regular expression. A cluster tries each expression on each sample, so there should be few.
_KEYS_A_REGEX = 1000
_OURS = re.compile(r"\^\(\?:((?:\\.|[^\\()\[\]{}*+?.^$])*)\)\\\.\[\^/\]\*\$", re.DOTALL)
_NAME_PART = re.compile(r"(?!\.+$)[A-Za-z0-9._-]+")
_PART = re.compile(r"(?:\\.|[^\\|])+", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class Grouping:
    """A rule by which `group_by` makes a map.

    Raises:
        ValueError: If the rule is unknown, or the shares do not fit it.
    """

    by: str
    shares: Mapping[str, float] = field(default_factory=dict)
    """Used by ``split``: name of a split -> its share of the samples; the sum of the shares is 1."""
    seed: int = 0
    """Used by ``split``: see `split_of`. It is the same for the shuffles of all epochs."""

    def __post_init__(self) -> None:
        if self.by not in _RULES:
            raise ValueError(f"by must be one of {', '.join(_RULES)}, got '{self.by}'")
        if (self.by == "split") != bool(self.shares):
            raise ValueError(
                "by 'split' needs shares, such as train=0.9,val=0.1"
                if self.by == "split"
                else f"by '{self.by}' takes no shares, got {dict(self.shares)}"
            )
        # This comparison also refuses NaN.
        is_split = all(share > 0 for share in self.shares.values()) and abs(sum(self.shares.values()) - 1) <= 1e-9
        if self.shares and not is_split:
            raise ValueError(f"shares must be positive and sum up to 1, got {dict(self.shares)}")
        if odd := next((name for name in self.shares if not _NAME_PART.fullmatch(name)), None):
            raise ValueError(f"a split's name may hold only letters, digits, '.', '_' and '-', got '{odd}'")


@dataclass(frozen=True)
class KeyMap:
    """Templates of shards, and the keys of each."""

    outputs: tuple[Template, ...]
    """Templates without extension."""
    keys: Mapping[str, int]
    """A key, or a first member's name -> the row of its template in ``outputs``."""
    patterns: tuple[tuple[str, int], ...]
    """Regular expressions, each with the row of its template."""
    where: str
    """Names the map in errors."""

    def assign(self, names: Sequence[str]) -> list[int]:
        """The row of each sample's template, by the name of the first member; -1 if the map does not name the sample.

        Raises:
            DataError: If a sample is mapped to two templates; names its key and both.
        """
        patterns = [(re.compile(pattern), row) for pattern, row in self.patterns]
        rows = [-1] * len(names)
        for position, name in enumerate(names):
            key = key_of(name)
            found = {self.keys[entry] for entry in (key, name) if entry in self.keys}
            found = found or {row for pattern, row in patterns if pattern.search(name)}
            if len(found) > 1:
                first, second = (str(self.outputs[row]) for row in sorted(found)[:2])
                raise DataError(f"{self.where}: key '{key}' is mapped to '{first}' and to '{second}'; expected one")
            if found:
                rows[position] = found.pop()
        return rows

    def cut(self, groups: Sequence[int], sizes: Sequence[int], *, target: int) -> list[tuple[int, str, list[int]]]:
        """Divide the samples among the shards of the map. Each template gets its samples in output order.

        This is dSort's rule for key maps: a shard that already holds more than ``target`` bytes takes no further
        sample. ``groups`` are the rows of their templates (-1: left out), ``sizes`` their bytes, and 512 a member.

        Returns:
            The row of its template, the name without extension, and the positions of the samples of each shard.

        Raises:
            DataError: If a template has fewer names than shards.
        """
        shards: list[list[tuple[int, str, list[int]]]] = [[] for _ in self.outputs]
        names = [template.names() for template in self.outputs]
        filled = [target + 1] * len(self.outputs)
        for position, group in enumerate(groups):
            if group < 0:
                continue
            if filled[group] > target:
                if (name := next(names[group], None)) is None:  # dSort's words
                    raise DataError(
                        f"{self.where}: number of shards to be created using {self.outputs[group]} template exceeds "
                        f"expected number of shards ({len(self.outputs[group])}); name more there, or take larger "
                        "shards: --shard-bytes"
                    )
                shards[group].append((group, name, []))
                filled[group] = 0
            shards[group][-1][2].append(position)
            filled[group] += sizes[position]
        return [shard for found in shards for shard in found]

    def unused(self, names: Sequence[str]) -> list[str]:
        """The keys without a sample, sorted; regular expressions are not counted."""
        return sorted({*self.keys}.difference(names, map(key_of, names)))


def parse_key_map(data: bytes, *, where: str, separator: str = "\t", extension: str = ".tar") -> KeyMap:
    """Read a map in either of AIS's forms; a template may end in the shards' ``extension``.

    Raises:
        DataError: If the data has neither form, maps no key or maps a key twice, or if a template or regular
            expression is invalid.
    """
    keys: dict[str, int] = {}
    patterns: dict[str, int] = {}
    outputs: dict[str, int] = {}
    for entry, text in _pairs(data, where=where, separator=separator or "\t"):
        stem = text.removesuffix(extension)
        if extension_of(stem):
            raise DataError(f"{where}: template '{text}' ends in {extension_of(stem)}, shards end in {extension}")
        row = outputs.setdefault(stem, len(outputs))
        found = _keys_of(entry)
        for key in found or [entry]:
            if (patterns if found is None else keys).setdefault(key, row) != row:
                raise DataError(f"{where}: key '{key}' occurs twice")
    if not outputs:
        raise DataError(f'{where}: maps no key; expected {{"cats-{{000..099}}.tar": ["cat/1", ...], ...}}')
    for entry in patterns:
        try:
            re.compile(entry)
        except re.error as exc:
            raise DataError(f"{where}: '{entry[:100]}' is not a regular expression: {exc}") from exc
    templates = []
    for text in outputs:
        try:
            templates.append(Template.parse(text))
        except ValueError as exc:
            raise DataError(f"{where}: {exc}") from exc
        if not len(templates[-1]):
            raise DataError(
                f"{where}: template '{text}' must hold a range of numbers, such as 'cats-{{000..099}}{extension}'"
            )
    return KeyMap(tuple(templates), keys, tuple(patterns.items()), where)


def regexes_of(keys: Sequence[str]) -> list[str]:
    """Make regular expressions that match only the samples of these keys; a cluster understands no other entries.

    >>> regexes_of(["a/2", "a/1"])[0].partition(")")[0]
    '^(?:a/1|a/2'
    """
    ordered = sorted(keys)  # keys with a common beginning are neighbours: Go's compiler joins them
    return [
        f"^(?:{'|'.join(map(re.escape, ordered[start : start + _KEYS_A_REGEX]))})\\.[^/]*$"
        for start in range(0, len(ordered), _KEYS_A_REGEX)
    ]


def group_by(
    names: Sequence[str],
    *,
    grouping: Grouping,
    prefix: str,
    labels: Sequence[int] = (),
    num_shards: int = 1,
    seed: int = 0,
) -> KeyMap:
    """Make a map by a rule.

    ==========  ======================================================================================================
    ``class``   each class id has its own shards: ``PREFIXclass07-{000000..999999}``
    ``balanced`` every shard has the same mixture of classes: ``PREFIX{000000..}``, ``num_shards`` shards; a class of
                n samples gives each shard n // num_shards samples or one more
    ``folder``  by the key's first directory: ``train/0001`` goes to ``PREFIXtrain-{000000..999999}``
    ``split``   by ``shares``, drawn by the rule's seed and the key: ``{"train": 0.9, "val": 0.1}`` gives
                ``PREFIXtrain-{..}`` and ``PREFIXval-{..}``; see `split_of`
    ==========  ======================================================================================================

    ``names`` are those of the samples' first members. ``labels``, the class id of each sample, are for ``class`` and
    ``balanced``; ``num_shards`` and ``seed``, which draws the samples of a class's part of a shard, for ``balanced``.

    Raises:
        DataError: If a key has no directory, or one that cannot be part of a name; or if a split gets no sample.
    """
    keys = [key_of(name) for name in names]
    by, where = grouping.by, f"by {grouping.by}"
    if by == "balanced":
        order = sorted(range(len(keys)), key=lambda position: (labels[position], _draw(keys[position], seed=seed)))
        # Each class starts at the shard after the last sample of the class before: remainders are spread evenly.
        dealt = {keys[position]: number % num_shards for number, position in enumerate(order)}
        fixed = (Template([prefix, ""], [range(row, row + 1)], [OUTPUT_DIGITS]) for row in range(num_shards))
        return KeyMap(tuple(fixed), dealt, (), where)
    if by == "class":
        width = max(len(str(abs(label))) for label in labels)
        groups = [f"class{label:0{width}d}" for label in labels]
    elif by == "folder":
        groups = [key.partition("/")[0] if "/" in key else "" for key in keys]
        if "" in groups:
            raise DataError(f"{where}: key '{keys[groups.index('')]}' has no directory")
        if odd := next((text for text in sorted(set(groups)) if not _NAME_PART.fullmatch(text)), None):
            raise DataError(
                f"{where}: directory '{odd}' names shards, so it may hold only letters, digits, '.', '_', '-'"
            )
    else:
        splits = list(grouping.shares)
        groups = [splits[split_of(key, grouping.shares, seed=grouping.seed)] for key in keys]
        if empty := [name for name in splits if name not in groups]:
            raise DataError(
                f"{where}: '{empty[0]}={grouping.shares[empty[0]]:g}' gets none of {len(keys)} samples; give it a "
                "larger share, or take another seed"
            )
    rows = {text: row for row, text in enumerate(sorted(set(groups)))}
    outputs = (Template([f"{prefix}{text}-", ""], [range(10**OUTPUT_DIGITS)], [OUTPUT_DIGITS]) for text in rows)
    return KeyMap(tuple(outputs), {key: rows[group] for key, group in zip(keys, groups, strict=True)}, (), where)


def split_of(key: str, shares: Mapping[str, float], *, seed: int) -> int:
    """The row of the split that a key belongs to.

    It is a function of key, shares and seed alone: the splits of other samples do not change when samples are added or
    removed. So the numbers of samples are near the shares, as if each sample were drawn by itself.

    >>> [split_of(key, {"train": 0.5, "val": 0.5}, seed=0) for key in ("a", "b", "c", "d")]
    [1, 1, 0, 1]
    """
    drawn = int.from_bytes(_draw(key, seed=seed)[:8], "big") / 2**64
    stops = list(itertools.accumulate(shares.values()))
    return min(bisect.bisect_right(stops, drawn), len(stops) - 1)


def _pairs(data: bytes, *, where: str, separator: str) -> Iterator[tuple[str, str]]:
    try:
        text = data.decode()
    except UnicodeDecodeError as exc:
        raise DataError(f"{where}: a key map is JSON or lines in UTF-8 ({exc.reason} at byte {exc.start})") from exc
    try:
        found = read_json(text)
    except ValueError as exc:
        if text.lstrip().startswith("{"):
            raise DataError(f"{where}: starts like JSON but is not valid JSON: {exc}") from exc
        for number, line in enumerate(text.splitlines(), 1):
            if not line.strip():
                continue
            parts = line.strip().split(separator)
            if len(parts) != 2 or not all(parts):
                raise DataError(
                    f"{where}, line {number}: expected KEY{separator!r}TEMPLATE, got '{line[:80]}'"
                ) from exc
            yield parts[0], parts[1]
        return
    is_map = isinstance(found, dict) and all(
        isinstance(keys, list) and all(isinstance(key, str) and key for key in keys) for keys in found.values()
    )
    if not is_map:
        raise DataError(f'{where}: expected {{"cats-{{000..099}}.tar": ["cat/1", ...], ...}}, got {str(found)[:60]}')
    for template, keys in found.items():
        for key in keys:
            yield key, template


def _keys_of(entry: str) -> list[str] | None:
    """The entry itself, or the keys in an expression of `regexes_of`; ``None`` for other expressions."""
    if not _SPECIAL.search(entry):
        return [entry]
    if (match := _OURS.fullmatch(entry)) is None:
        return None
    return [re.sub(r"\\(.)", r"\1", part, flags=re.DOTALL) for part in _PART.findall(match[1])]


def _draw(key: str, *, seed: int) -> bytes:
    return hashlib.blake2b(f"{seed}/{key}".encode("utf-8", "surrogateescape"), digest_size=16).digest()
