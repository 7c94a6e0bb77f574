"""Judge which components of a data set hold the photo and which the mask, by names and counts; no shard is read.

Loader, index, verify, view, info, pack and bench ask here. `photo_roles` is the judgement. `find_photo` and `find_mask`
are what graphs take: the name of one component, or alternatives, ``"jpg;jpeg"``, if each sample has one of the two.
"""

import re
from collections.abc import Callable, Mapping, Sequence, Set
from typing import NamedTuple

from dali_pipes.errors import DataError, printable
from dali_pipes.formats.photo_header import is_photo

_MASK_WORDS = frozenset({"mask", "masks", "seg", "segmentation", "trimap", "label", "labels", "annotation"})


class ComponentCounts(NamedTuple):
    """How many samples of a data set have each component, as its manifest says."""

    components: Mapping[str, int]
    num_samples: int


class PhotoRoles(NamedTuple):
    """The components of a data set that are photos by their names: which hold the photo, and which a mask."""

    photos: tuple[str, ...]
    """Usually one, or alternatives of which each sample has one; the most frequent first."""
    masks: tuple[str, ...]


DataSets = Mapping[str, ComponentCounts]
"""The data sets of a mixture by their names; one empty name if there is only one data set."""


def photo_roles(counts: ComponentCounts, *, besides: Sequence[str] = ()) -> PhotoRoles:
    """Judge the photo components of a data set, except those that are known to be something else (``besides``).

    If those without a mask's word in their names occur as often as there are samples, they are alternatives: a folder
    of JPEG, PNG and WEBP files. Otherwise `is_mask_name` decides. Whether a sample has two alternatives all the same is
    not known here.

    >>> photo_roles(ComponentCounts({"cls": 9, "jpg": 6, "png": 3}, 9))
    PhotoRoles(photos=('jpg', 'png'), masks=())
    >>> photo_roles(ComponentCounts({"jpg": 9, "png": 3}, 9))
    PhotoRoles(photos=('jpg',), masks=('png',))
    """
    names = _all_photos(counts)
    ordered = sorted(names.difference(besides), key=lambda name: (-counts.components[name], name))
    photos = [name for name in ordered if not has_mask_word(name)]
    if len(ordered) == 1:
        photos = ordered
    elif not _are_alternatives(photos, counts):
        photos = [name for name in ordered if not is_mask_name(name, names)]
    return PhotoRoles(tuple(photos), tuple(name for name in ordered if name not in photos))


def is_mask_name(component: str, photos: Set[str]) -> bool:
    """Whether a photo component is a mask, by its name and the names of the sample's other photos.

    It is a mask if a word of its name says so (``seg.png``, ``trimap.png``, ``left-mask.png``), or if it is a PNG and
    another photo is not. The only photo of a sample is never a mask.

    >>> is_mask_name("trimap.png", {"image.jpg", "trimap.png"}), is_mask_name("png", {"png"})
    (True, False)
    >>> is_mask_name("mask.jpg", {"jpg", "mask.jpg"}), is_mask_name("masked.jpg", {"jpg", "masked.jpg"})
    (True, False)
    """
    if len(photos) < 2:
        return False
    if has_mask_word(component):
        return True
    return component.rpartition(".")[2] == "png" and any(not photo.endswith("png") for photo in photos)


def find_photo(sets: DataSets, *, besides: str = "") -> str:
    """Return the component that holds the photo of each sample.

    It is the only component that is a photo by its name and not a mask, or alternatives: see `photo_roles`.

    Args:
        sets: Their components. In a mixture each data set may have its own name for the photo.
        besides: A component that holds something else, such as the mask, or alternatives.

    Raises:
        DataError: If no component is a photo, or if it is not clear which one; names the candidates.

    >>> find_photo({"": ComponentCounts({"cls": 9, "image.jpg": 9, "trimap.png": 9}, 9)})
    'image.jpg'
    >>> find_photo({"": ComponentCounts({"jpg": 6, "jpeg": 2, "png": 1}, 9)})
    'jpg;jpeg;png'
    """
    return _find(sets, lambda counts: photo_roles(counts, besides=besides.split(";")).photos, what="photo")


def find_mask(sets: DataSets, *, photo: str) -> str:
    """Return the component that holds the mask of each sample.

    It is the only component that is a mask by its name, or else the only photo beside ``photo``. Alternatives are as in
    `find_photo`.

    Raises:
        DataError: If there is none, or if it is not clear which one; names the candidates.

    >>> find_mask({"": ComponentCounts({"cls": 9, "image.jpg": 9, "trimap.png": 9}, 9)}, photo="image.jpg")
    'trimap.png'
    """
    return _find(sets, lambda counts: _mask_names(counts, photo.split(";")), what="mask")


def has_mask(sets: DataSets, *, photo: str) -> bool:
    """Whether each data set has a component beside ``photo`` that is a mask by its name.

    >>> has_mask({"": ComponentCounts({"jpg": 9, "cls": 9}, 9)}, photo="jpg")
    False
    """
    return all(_named_masks(counts, photo.split(";")) for counts in sets.values())


def _mask_names(counts: ComponentCounts, besides: Sequence[str]) -> Sequence[str]:
    return _named_masks(counts, besides) or [name for name in _all_photos(counts) if name not in besides]


def _named_masks(counts: ComponentCounts, besides: Sequence[str]) -> Sequence[str]:
    names = _all_photos(counts)
    return [name for name in names if name not in besides and is_mask_name(name, names)]


def _all_photos(counts: ComponentCounts) -> set[str]:
    return {name for name, num in counts.components.items() if num and is_photo(name)}


def _find(sets: DataSets, candidates_of: Callable[[ComponentCounts], Sequence[str]], *, what: str) -> str:
    found: dict[str, list[str]] = {}
    for set_, counts in sets.items():
        names = sorted(candidates_of(counts), key=lambda name: (-counts.components[name], name))
        if len(names) != 1 and not _are_alternatives(names, counts):
            raise DataError(_problem(set_, counts, names, what=what))
        found[set_] = names
    alternatives = list(dict.fromkeys(name for names in found.values() for name in names))
    for set_, names in found.items():
        if others := [name for name in alternatives if name not in names and sets[set_].components.get(name)]:
            # The first alternative that a sample has is taken, which would be the other one.
            raise DataError(
                f"data set '{printable(set_)}' of the mixture has its {what} in '{printable(names[0])}', and also the "
                f"component '{printable(others[0])}', which is the {what} in another data set; name both, that of each "
                f"sample first: {what}='{printable(names[0])};{printable(others[0])}'"
            )
    return ";".join(alternatives)


def _are_alternatives(names: Sequence[str], counts: ComponentCounts) -> bool:
    return len(names) > 1 and sum(counts.components[name] for name in names) == counts.num_samples


def _problem(set_: str, counts: ComponentCounts, names: Sequence[str], *, what: str) -> str:
    where = f"data set '{printable(set_)}': " if set_ else ""
    if names:
        listed = ", ".join(
            f"'{printable(name)}' ({counts.components[name]} of {counts.num_samples} samples)" for name in names
        )
        advice = f"name one of them: {what}='{printable(names[0])}'"
        return f"{where}expected one component that holds the {what}, found {listed}; {advice}"
    there = ", ".join(f"'{printable(name)}'" for name in sorted(counts.components)) or "none"
    expected = "a photo by its name" if what == "photo" else "a mask by its name, or a second photo"
    return f"{where}expected a component that is {expected}, found {there}; name the component: {what}='NAME'"


def has_mask_word(component: str) -> bool:
    """Whether a word before the extension says that the component is a mask: ``left-mask.png``."""
    stem = component.rpartition(".")[0]
    return not _MASK_WORDS.isdisjoint(re.split(r"[._-]", stem))
