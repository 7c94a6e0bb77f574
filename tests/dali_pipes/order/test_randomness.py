"""The generator against its published answers, and what the numbers promise."""

import numpy as np
import pytest

from dali_pipes.order.randomness import Stream, philox4x32

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        # The known-answer vectors that Random123, the reference implementation, publishes for philox4x32-10.
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: tuple, key: tuple, expected: tuple) -> None:
    """The generator is the one it says it is."""
    words = philox4x32(tuple(np.array([word], np.uint64) for word in counter), key)
    assert tuple(int(word[0]) for word in words) == expected


def test_stream_numbers_depend_on_the_sample_alone() -> None:
    """A sample's numbers are the same in any batch, and more of them start with the same ones."""
    stream = Stream(1, 2, "crop")
    together = stream.uniforms(np.arange(100), 6)
    alone = np.concatenate([stream.uniforms(np.array([i]), 6) for i in range(100)])
    assert np.array_equal(together, alone)
    assert np.array_equal(stream.uniforms(np.arange(100), 22)[:, :6], together)
    shuffled = np.random.default_rng(0).permutation(100)
    assert np.array_equal(stream.uniforms(shuffled, 6), together[shuffled])


@pytest.mark.parametrize(
    "other",
    [
        Stream(2, 2, "crop").uniforms(np.arange(50), 4),  # another seed
        Stream(1, 3, "crop").uniforms(np.arange(50), 4),  # another epoch
        Stream(1, 2, "flip").uniforms(np.arange(50), 4),  # another purpose
        Stream(1, 2, "crop").uniforms(np.arange(50), 4, occurrence=1),  # the sample's second time
        Stream(1, 2, "crop").uniforms(np.arange(50) + 2**32, 4),  # ordinals past 32 bits
    ],
)
def test_stream_inputs_all_count(other: np.ndarray) -> None:
    """Each input of a stream gives other numbers."""
    assert not np.isin(other, Stream(1, 2, "crop").uniforms(np.arange(50), 4)).any()
