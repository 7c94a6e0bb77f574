"""Recode the photos and masks of one record."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeVar

from dali_pipes.formats.photo_header import CONVERTIBLE_FORMATS, read_whole_photo_header
from dali_pipes.formats.photo_rules import PhotoRules, size_problem
from prep.photos.apart import Undecodable
from prep.recode.jpegs import NotJpegError, optimized
from prep.recode.photos import Recoding, converted, optimized_mask, resized, resized_mask

RESIZED, CONVERTED, OPTIMIZED, KEPT = "resized", "converted", "optimized", "kept"
MADE_JPEG = "resized and made JPEGs"
MASK_RESIZED, MASK_OPTIMIZED = "masks resized", "masks optimized"
_JPEG_EXTENSIONS = frozenset({"jpg", "jpeg", "jpe"})

Result = TypeVar("Result")


class NewPhoto(NamedTuple):
    """The new name and the new bytes of a photo or mask."""

    component: str
    data: bytes


class RecodedRecord(NamedTuple):
    """The result of `recode_record`."""

    changed: Mapping[str, NewPhoto]
    """component -> its new name and bytes, for those that changed."""
    actions: Sequence[str]
    """What was done, for each photo and mask."""
    flaw: str = ""
    """Why the record could not be recoded; then nothing of it is changed."""
    note: str = ""
    """A remark on a record that is packed."""


def recode_record(
    photos: Mapping[str, bytes], *, masks: frozenset[str], recoding: Recoding, rules: PhotoRules
) -> RecodedRecord:
    """Recode the photos and masks of one record, component -> bytes; if one of them fails, none is changed.

    A mask belongs to the first photo that is not a mask, as for the check.

    Raises:
        PipesError: If a library or program that is needed is not installed.
    """
    recoder = _Recoder(photos, recoding, rules)
    try:
        others = [component for component in photos if component not in masks]
        for component in others:
            recoder.recode_photo(component)
        for component in photos:
            if component in masks:
                recoder.recode_mask(component, of=others[0] if others else None)
        recoder.check_names()
    except _FlawError as exc:
        return RecodedRecord({}, (KEPT,) * len(photos), flaw=str(exc))
    return RecodedRecord(recoder.changed, tuple(recoder.actions), note="; ".join(recoder.notes))


class _FlawError(Exception):
    """Why a record cannot be recoded."""


class _Recoder:
    def __init__(self, photos: Mapping[str, bytes], recoding: Recoding, rules: PhotoRules) -> None:
        self._photos, self._recoding, self._rules = photos, recoding, rules
        self.changed: dict[str, NewPhoto] = {}
        self.actions: list[str] = []
        self.notes: list[str] = []
        self._sizes: dict[str, tuple[int, int]] = {}
        """Height and width of each photo, as they were."""

    def recode_photo(self, component: str) -> None:
        data = self._photos[component]
        header = read_whole_photo_header(data)
        self._sizes[component] = header.height, header.width
        if header.format in CONVERTIBLE_FORMATS and self._recoding.convert:
            new, size = self._try(component, lambda: converted(data, header, self._recoding, rules=self._rules))
            self._sizes[component] = size
            self._take(component, new, CONVERTED)
        elif self._rules.problem(header) is not None:
            self.actions.append(KEPT)
        elif self._new_size(component) is not None:
            new = self._try(component, lambda: resized(data, header, self._recoding))
            self._take(component, new, RESIZED if header.format == "JPEG" else MADE_JPEG)
        elif self._recoding.optimize and header.format == "JPEG":
            try:
                self._take(component, optimized(data), OPTIMIZED)
            except NotJpegError as exc:
                self.notes.append(f"{component} is not optimized: {exc}")
                self.actions.append(KEPT)
        else:
            self.actions.append(KEPT)

    def recode_mask(self, component: str, *, of: str | None) -> None:
        data = self._photos[component]
        header = read_whole_photo_header(data)
        new_size = self._new_size(of) if of is not None else None
        if self._rules.problem(header) is not None:
            self.actions.append(KEPT)
        elif of is not None and new_size is not None:
            found, expected = (header.height, header.width), self._sizes[of]
            if found != expected:
                raise _FlawError(f"{component} {size_problem(of, expected, found)}")
            self._take(component, self._try(component, lambda: resized_mask(data, *new_size)), MASK_RESIZED)
        elif self._recoding.optimize:
            self._take(component, self._try(component, lambda: optimized_mask(data)), MASK_OPTIMIZED)
        else:
            self.actions.append(KEPT)

    def check_names(self) -> None:
        """Refuse a photo that would take the name of another component."""
        names = [self.changed[name].component if name in self.changed else name for name in self._photos]
        for name in names:
            if names.count(name) > 1:
                raise _FlawError(f"two photos would be component '{name}' as JPEGs; name them apart")

    def _new_size(self, component: str) -> tuple[int, int] | None:
        height, width = self._sizes[component]
        return self._recoding.new_size(height, width) if height and width else None

    def _take(self, component: str, new: bytes, action: str) -> None:
        stem, dot, extension = component.rpartition(".")
        is_jpeg = action in (RESIZED, MADE_JPEG, CONVERTED) and extension.lower() not in _JPEG_EXTENSIONS
        name = f"{stem}{dot}jpg" if is_jpeg else component
        is_changed = name != component or new != self._photos[component]
        if is_changed:
            self.changed[component] = NewPhoto(name, new)
        self.actions.append(action if is_changed else KEPT)

    def _try(self, component: str, function: Callable[[], Result]) -> Result:
        try:
            return function()
        except Undecodable as exc:
            raise _FlawError(f"{component} {exc}") from exc
