"""Random numbers of a graph stay within their bounds."""

import math

import numpy as np
import numpy.typing as npt

import dali_pipes as dp
from dali_pipes.order.randomness import Stream

NUM = 20_000


def test_uniform_never_reaches_its_upper_bound() -> None:
    """[low, high), in float32 too."""

    class Always:
        def array(self, function):
            class Batch:
                def uniforms(self, name: str, num: int) -> np.ndarray:
                    return np.array([[0.0], [1 - 2**-32]])

            return function(Batch())

    drawn = dp.Random(Always()).uniform(2.0, 3.0)
    assert drawn.tolist()[0] == 2.0
    assert math.nextafter(3.0, 0) > drawn.tolist()[1] > 2.99


class Drawn:
    """Components that give a graph's arrays for samples 0 to NUM - 1, drawn by the real generator."""

    def array(self, function):
        class Batch:
            def uniforms(self, name: str, num: int) -> npt.NDArray[np.float64]:
                return Stream(5, 2, f"graph/{name}").uniforms(np.arange(NUM), num)

        return function(Batch())

    def size(self, component: str, *, orient: bool = False):
        return lambda batch: (np.full(NUM, 300, np.int32), np.full(NUM, 400, np.int32))


def chi_squared(*columns: npt.NDArray[np.float64]) -> float:
    """Of ten by ten cells for two columns, or a hundred for one, all as likely: 99 degrees of freedom."""
    cells = np.clip((columns[0] * (10 if len(columns) == 2 else 100)).astype(int), 0, 99)
    if len(columns) == 2:
        cells = cells * 10 + np.clip((columns[1] * 10).astype(int), 0, 9)
    counts = np.bincount(cells, minlength=100)
    return float(((counts - NUM / 100) ** 2 / (NUM / 100)).sum())


def test_unnamed_draws_are_uniform_and_independent() -> None:
    """Each call has a stream of its own: every pair fills the square evenly. The 99.99 % point is 160."""
    random = dp.Random(Drawn())
    columns = [random.uniform() for _ in range(4)]
    random.coin_flip()  # of another kind, counted as well
    columns.append(random.uniform())
    for number, column in enumerate(columns):
        assert chi_squared(column) < 160
        for other in columns[:number]:
            assert chi_squared(column, other) < 160
    assert chi_squared(columns[0], columns[0]) > 1000  # the test can fail


def test_streams_are_named_by_kind_and_number() -> None:
    """`uniform/0`, `coin_flip/1`: a name that is given has the same numbers, and a change breaks users' runs."""
    random = dp.Random(Drawn())
    first, coin, third = random.uniform(), random.coin_flip(0.3), random.uniform(stream="mine")
    fourth = random.uniform()
    expected = [
        Stream(5, 2, f"graph/{name}").uniforms(np.arange(NUM), 1)[:, 0]
        for name in ("uniform/0", "coin_flip/1", "mine", "uniform/3")
    ]
    assert np.allclose(first, expected[0], atol=1e-6)
    assert np.array_equal(coin, expected[1] < 0.3)
    assert np.allclose(third, expected[2], atol=1e-6)
    assert np.allclose(fourth, expected[3], atol=1e-6)
    again = dp.Random(Drawn())
    assert np.array_equal(again.uniform(stream="uniform/0"), first)
    assert coin.dtype == np.int32
    assert abs(coin.mean() - 0.3) < 4 * math.sqrt(0.21 / NUM)


def test_places_of_crops_are_uniform_and_independent_of_their_size() -> None:
    """The slack before a crop, as a share of all slack, fills [0, 1) evenly, whatever the crop's area."""
    start, shape = dp.Random(Drawn()).resized_crop("jpg", scale=(0.1, 0.3), ratio=(1, 1))
    share = (start + 0.5) / (np.array([300, 400]) - shape + 1)
    area = shape.prod(axis=1) / 120_000
    assert 0.099 < area.min() < 0.11
    assert 0.29 < area.max() < 0.302
    assert np.abs(share.mean(axis=0) - 0.5).max() < 4 / math.sqrt(12 * NUM)
    assert abs(np.corrcoef(share[:, 0], share[:, 1])[0, 1]) < 4 / math.sqrt(NUM)
    assert abs(np.corrcoef(share[:, 0], area)[0, 1]) < 4 / math.sqrt(NUM)
    counts = np.histogram2d(share[:, 0], share[:, 1], 5, ((0, 1), (0, 1)))[0]
    assert ((counts - NUM / 25) ** 2 / (NUM / 25)).sum() < 70  # 24 degrees of freedom, and whole pixels
