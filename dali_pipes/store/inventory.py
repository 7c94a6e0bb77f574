"""Say which data sets are in a place, for the error of a name that matches none of them."""

import difflib
from collections import Counter

from dali_pipes.errors import PipesError, printable
from dali_pipes.formats.names import manifest_name
from dali_pipes.store.base import Store
from dali_pipes.store.shard_names import ending_of, grown_prefix, prefix_of

# Data sets, or kinds of other files, that an error shows.
_NUM_SHOWN = 6


def inventory(store: Store, prefix: str) -> str:
    """What the folder of a prefix holds, those first that are called alike: ``'ais://pets/train-' (9 shards)``.

    A bucket in whose folder there is nothing is listed as a whole. The text is empty if there is nothing, or if it
    cannot be listed: the error that it is for matters more.
    """
    folder = prefix.rpartition("/")[0]
    try:
        names = [entry.name for entry in store.list(f"{folder}/" if folder else "")]
        if not names and folder and store.directory is None:
            names = [entry.name for entry in store.list("")]
    except (PipesError, OSError):
        return ""
    indexed = {name for name in names if name.endswith(manifest_name(""))}
    sets = Counter(_set_of(name, indexed) for name in names if ending_of(name))
    if sets:
        alike = sorted(sets, key=lambda name: (-difflib.SequenceMatcher(None, name, prefix).ratio(), name))
        texts = [
            f"'{printable(store.locate(name))}' ({sets[name]} shard{'' if sets[name] == 1 else 's'}"
            f"{'' if manifest_name(name) in indexed else ', not indexed'})"
            for name in alike[:_NUM_SHOWN]
        ]
    else:
        texts = [f"{number} {printable(kind)}" for kind, number in _kinds(names).most_common(_NUM_SHOWN)]
    more = max(len(sets), 0) - len(texts) if sets else 0
    return ", ".join(texts) + (f" and {more} more" if more else "")


def _set_of(name: str, indexed: set[str]) -> str:
    """The prefix of a shard's data set; shards that were added to one belong to it."""
    grown = grown_prefix([name])
    return grown if grown is not None and manifest_name(grown) in indexed else prefix_of(name)


def there_is(store: Store, prefix: str) -> str:
    """`inventory` as the end of an error's text: ``; there are ...``, or empty."""
    found = inventory(store, prefix)
    return f"; what is there: {found}" if found else ""


def _kinds(names: list[str]) -> Counter[str]:
    """The numbers of files by their extensions."""
    ends = (name.rpartition("/")[2] for name in names)
    return Counter(f".{end.rpartition('.')[2]}" if "." in end else "without an extension" for end in ends)
