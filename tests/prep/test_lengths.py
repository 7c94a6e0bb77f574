"""Every class that iterates says before how often it will, or why not."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterable, Sized

import dali_pipes.formats
import prep
from dali_pipes.formats.tar_reader import ArchiveReader

# Modules that are programs: importing one runs it.
PROGRAMS = {"prep.__main__"}


def _classes() -> dict[str, type]:
    """All classes of prep and of the formats, those with an underscore, too."""
    places = ((prep.__path__, "prep."), (dali_pipes.formats.__path__, "dali_pipes.formats."))
    names = [module.name for path, prefix in places for module in pkgutil.walk_packages(path, prefix)]
    return {
        f"{name}.{found.__qualname__}": found
        for name in names
        if name not in PROGRAMS
        for found in vars(importlib.import_module(name)).values()
        if inspect.isclass(found) and found.__module__ == name
    }


def test_every_class_that_iterates_has_a_length_or_says_why_not() -> None:
    """A new one without either fails here."""
    iterating = {name: found for name, found in _classes().items() if issubclass(found, Iterable)}
    assert {
        "dali_pipes.formats.texts.Texts",
        "prep.sources.tables._Rows",
        "dali_pipes.formats.tar_reader.ArchiveReader",
    } <= set(iterating)
    without = {
        name
        for name, found in iterating.items()
        if not issubclass(found, Sized) and not any("no len()" in (base.__doc__ or "") for base in found.__mro__)
    }
    assert without == set()
    assert not issubclass(ArchiveReader, Sized), "a tar has no table of contents"
