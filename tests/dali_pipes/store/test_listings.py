"""A listing as columns: the same rows as a list of entries, in less memory."""

import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dali_pipes.errors import StoreError
from dali_pipes.store import listings
from dali_pipes.store.listings import Entries, EntriesBuilder, Found
from dali_pipes.store.shard_names import ObjectEntry

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)
ENTRIES = st.lists(
    st.builds(
        ObjectEntry,
        name=NAMES,
        size=st.integers(0, 2**62),
        checksum=st.none() | st.text("0123456789abcdef", min_size=16, max_size=16),
        written_ns=st.none() | st.tuples(st.integers(0, 2**62), st.integers(0, 2**62)),
    ),
    max_size=12,
)


def collected(pages: list[list[ObjectEntry]]) -> Entries:
    builder = EntriesBuilder()
    for page in pages:
        builder.extend(page)
    return builder.finish()


@settings(max_examples=200, deadline=None)
@given(st.lists(ENTRIES, max_size=4), st.booleans(), st.lists(NAMES, max_size=12))
def test_listing_has_each_name_once_and_sorted(
    pages: list[list[ObjectEntry]], is_sorted: bool, asked: list[str]
) -> None:
    """Whatever order the pages come in, and wherever the rows that are collected at a time end."""
    if is_sorted:
        pages = [sorted((entry for page in pages for entry in page), key=lambda entry: entry.name)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listings, "_COLLECTED", 3)
        listed = collected(pages)
        expected = sorted(
            {entry.name: entry for page in pages for entry in page}.values(), key=lambda entry: entry.name
        )
        rows = list(listed)
    assert rows == expected
    assert [entry.written_ns for entry in rows] == [entry.written_ns for entry in expected]
    assert [listed[row] for row in range(len(listed))] == expected
    assert listed == expected
    assert listed[1:3] == expected[1:3]
    assert pickle.loads(pickle.dumps(listed)) == listed
    by_name = {entry.name: entry for entry in expected}
    for wanted in (asked, sorted(asked)):
        found = Found.among(listed, wanted)
        assert list(found) == [by_name.get(name) for name in wanted]
        assert list(Found.of(list(found))) == list(found)
        assert list(found[1:]) == list(found)[1:]
        assert found.lacking(wanted) == [name for name in wanted if name not in by_name]


def test_numbers_beyond_64_bits_are_refused() -> None:
    """Whatever a server answers: the error names the listing and the object."""
    sizes = {"a.tar": 1, "b.tar": 1 << 63}
    rows = [ObjectEntry(name=name, size=size, checksum=None, written_ns=None) for name, size in sizes.items()]
    with pytest.raises(StoreError, match=r"'s3://b/': expected .* found 'b\.tar' with 9223372036854775808 bytes"):
        EntriesBuilder("s3://b/").extend(rows)
