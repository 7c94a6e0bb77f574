"""The loader's contract: each sample once, lengths exact, break, reset, epochs, and going on after an error."""

import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

import dali_pipes as dp
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests import loaders
from tests.loaders import keys_of
from tests.shards import Sample, make_samples, photo_bytes, write_shards, write_tar

KEYS = [f"s{i:05d}" for i in range(23)]


open_loader = partial(loaders.open_loader, batch_size=5)


@pytest.mark.parametrize(
    ("policy", "batch_size", "sizes", "num_distinct"),
    [
        ("PARTIAL", 5, [5, 5, 5, 5, 3], 23),
        ("FILL", 5, [5, 5, 5, 5, 5], 23),
        ("DROP", 5, [5, 5, 5, 5], 20),
        ("PARTIAL", 23, [23], 23),  # one batch, exactly full
        ("PARTIAL", 64, [23], 23),  # an epoch smaller than a batch
        ("FILL", 64, [64], 23),
        ("DROP", 22, [22], 22),
        ("PARTIAL", 22, [22, 1], 23),
    ],
)
def test_epoch_has_the_batches_that_len_says(
    small_shards: Path, policy: str, batch_size: int, sizes: list[int], num_distinct: int
) -> None:
    """Lengths are exact before the first batch, batches are as long as the policy says, no key comes twice unfilled."""
    with open_loader(small_shards, batch_size=batch_size, last_batch_policy=policy) as loader:
        assert len(loader) == len(sizes)
        assert loader.num_samples == 23
        for _ in range(2):
            batches = list(loader)
            assert [len(batch["label"]) for (batch,) in batches] == sizes
            assert len(set(keys_of(batches))) == num_distinct


def test_batches_can_be_held(small_shards: Path) -> None:
    """Tensors of earlier batches stay as they were while later ones are made."""
    import torch

    with open_loader(small_shards, seed=1) as loader:
        held = [batch for (batch,) in loader]
    with open_loader(small_shards, seed=1) as loader:
        for kept, (batch,) in zip(held, loader, strict=True):
            assert torch.equal(kept["image"], batch["image"])


def test_reset_after_an_epoch_starts_one_not_two(small_shards: Path) -> None:
    """The loop of DALI's examples, `for batch in it: ...; it.reset()`, visits epochs 0, 1, 2."""
    with open_loader(small_shards, seed=2) as loader:
        visited = []
        for _ in range(3):
            visited.append(loader.epoch)
            keys = keys_of(loader)
            assert sorted(keys) == KEYS
            loader.reset()
            loader.reset()  # before the first batch of an epoch there is nothing to give up
        assert visited == [0, 1, 2]


def test_labels_contiguous_count_from_zero(tmp_path: Path) -> None:
    """Class ids 10, 20, 30 of the class table become 0, 1, 2; without a table the error says so."""
    samples = [
        Sample(f"k{i}", {"cls": str(10 * (i % 3 + 1)).encode(), "image.jpg": photo_bytes(i, 20, 20)}) for i in range(6)
    ]
    write_tar(tmp_path / "x-0.tar", samples)
    shards = resolve_shards(tmp_path, endpoint=None)
    graph = dp.classification_eval(resize=16, crop=16)
    index_shards(shards)
    with pytest.raises(
        dp.DataError, match=r"needs a class table, and the manifest has none; write 'x-classes.json' beside"
    ):
        dp.loader(tmp_path, graph, batch_size=6, outputs=dp.Outputs(labels="contiguous"), device="cpu")
    index_shards(shards, classes={10: "a", 20: "b", 30: "c"})
    for labels, expected in (("raw", [10, 20, 30] * 2), ("contiguous", [0, 1, 2] * 2)):
        with dp.loader(
            tmp_path, graph, batch_size=6, outputs=dp.Outputs(labels=labels), shuffle=False, device="cpu"
        ) as loader:
            assert next(loader)[0]["label"].tolist() == expected


def test_names_with_spaces_and_other_scripts_are_read(tmp_path: Path) -> None:
    """Keys that no index made by other tools can hold."""
    keys = ["a b/c d", "ключ", "x%20y", 'q"uote']
    samples = [Sample(key, s.components) for key, s in zip(keys, make_samples([(20, 20)] * 4), strict=True)]
    shards = write_shards(tmp_path, samples, per_shard=4)
    with open_loader(shards, batch_size=4) as loader:
        assert sorted(keys_of(loader)) == sorted(keys)


# --- cut short, and going on ------------------------------------------------------------------------------------------


def numbered(components: dp.Components, random: dp.Random) -> dict[str, object]:
    """A graph whose bytes and array both tell the sample: `cls` holds the key's number in `numbered_shards`."""
    from nvidia.dali import fn

    return {"bytes": fn.pad(components["cls"]), "ordinal": components.array(lambda batch: batch.ordinals)}


@pytest.fixture
def numbered_shards(tmp_path: Path) -> Path:
    samples = [
        Sample(f"k{i:02d}", {"cls": f"{i:02d}".encode(), "image.jpg": photo_bytes(i, 16, 16)}) for i in range(24)
    ]
    return write_shards(tmp_path, samples, per_shard=6)


def check_together(batch: dict) -> list[int]:
    """Bytes, array and key of each row are those of one sample."""
    from_bytes = [int(bytes(row.tolist())) for row in batch["bytes"]]
    assert from_bytes == batch["ordinal"].tolist() == [int(key[1:]) for key in batch["key"]]
    return from_bytes


@pytest.mark.parametrize(
    ("where", "after"),
    [
        ("between-inputs", "go-on"),
        ("between-inputs", "set-epoch"),
        ("after-outputs", "go-on"),
        ("in-the-feed", "go-on"),
    ],
)
def test_ctrl_c_in_next_loses_and_mixes_nothing(
    numbered_shards: Path, monkeypatch: pytest.MonkeyPatch, where: str, after: str
) -> None:
    """Interrupted at any point and gone on with, as in a notebook: no batch is lost, no row gets another's label."""
    from dali_pipes.graph.decode import DecodePipeline
    from dali_pipes.reader.feed import Feed

    owner, name = {
        "between-inputs": (DecodePipeline, "_next_input"),
        "after-outputs": (DecodePipeline, "take"),
        "in-the-feed": (Feed, "next"),
    }[where]
    original = getattr(owner, name)
    calls = 0

    def interrupted(self: object, *arguments: object) -> object:
        nonlocal calls
        calls += 1
        result = original(self, *arguments)
        if calls == 6:  # in the third batch or so, after one of its two inputs was fed
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(owner, name, interrupted)
    with dp.loader(
        numbered_shards, numbered, batch_size=4, seed=1, device="cpu", outputs=dp.Outputs(keys=True)
    ) as loader:
        seen: list[int] = []
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 (which batch it is in is not the point)
            for (batch,) in loader:
                seen += check_together(batch)
        if after == "go-on":
            for (batch,) in loader:
                seen += check_together(batch)
            assert sorted(seen) == list(range(24))
        loader.set_epoch(1)
        assert sorted(row for (batch,) in loader for row in check_together(batch)) == list(range(24))


@pytest.mark.parametrize("bad", [None, [1, 2], 0.5], ids=["None", "list", "wrong-dtype"])
def test_array_of_another_kind_later_is_refused_and_mixes_nothing(numbered_shards: Path, bad: object) -> None:
    """A user's array that is something else in one batch: refused by its kind; batches after it hold together."""
    fail = [True]

    def array(batch: object) -> object:
        if 8 in batch.ordinals.tolist() and fail and fail.pop():
            return batch.ordinals * bad if isinstance(bad, float) else bad
        return batch.ordinals

    def graph(components: dp.Components, random: dp.Random) -> dict[str, object]:
        return numbered(components, random) | {"ordinal": components.array(array)}

    with dp.loader(
        numbered_shards, graph, batch_size=4, shuffle=False, device="cpu", outputs=dp.Outputs(keys=True)
    ) as loader:
        seen = [row for _ in range(2) for row in check_together(next(loader)[0])]
        with pytest.raises(TypeError, match="array of the graph"):
            next(loader)
        seen += [row for (batch,) in loader for row in check_together(batch)]
        assert seen == list(range(24))


def test_shard_that_could_not_be_read_is_tried_again(tmp_path: Path) -> None:
    """A store that fails once: the error is raised once, and the epoch goes on where it stopped.

    A link to nowhere, because a missing shard is refused before the loader opens.
    """
    shards = write_shards(tmp_path, make_samples([(30, 30)] * 6), per_shard=3)
    path = tmp_path / "s-000001.tar"
    path.rename(tmp_path / "hidden")
    path.symlink_to(tmp_path / "nowhere")
    with open_loader(shards / "s-{000000..000001}.tar", batch_size=3, shuffle=False) as loader:
        seen = keys_of([next(loader)])
        with pytest.raises(dp.StoreError, match=r"s-000001.tar"):
            next(loader)
        path.unlink()
        (tmp_path / "hidden").rename(path)
        assert len(seen + keys_of(loader)) == 6


def test_loader_that_is_left_open_at_the_end_of_a_program_says_nothing(small_shards: Path) -> None:
    """Names of the module are gone by then; what is open ends with the process."""
    program = (
        "import sys, dali_pipes as dp\n"
        "loader = dp.loader(sys.argv[1], dp.segmentation(crop=32), batch_size=4, seed=1)\n"
        "print(len(list(loader)))\n"
    )
    run = subprocess.run([sys.executable, "-c", program, small_shards], capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert int(run.stdout) > 0


def test_program_that_ends_with_a_loader_open_does_not_wait_for_its_shards(tmp_path: Path) -> None:
    """Ctrl-C or an exception with a thousand shards still to fetch: the program ends."""
    shards = write_shards(tmp_path, make_samples([(16, 16)] * 200), per_shard=1)
    program = (
        "import sys, time\nimport dali_pipes as dp\nfrom dali_pipes.store.local import LocalStore\n"
        "original, count = LocalStore.open, [0]\n"
        "def slow(self, name):\n"
        "    if name.endswith('.tar'): count[0] += 1; time.sleep(0.5)\n"
        "    return original(self, name)\n"
        "LocalStore.open = slow\n"
        "import atexit; atexit.register(lambda: print(count[0]))\n"
        "loader = dp.loader(sys.argv[1], dp.segmentation(crop=16), batch_size=1, device='cpu')\n"
        "next(loader)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, shards], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 120


def test_collecting_a_dropped_loader_in_a_forked_child_does_not_hang(small_shards: Path) -> None:
    """The child has none of the pipeline's threads, and must not wait for them."""
    program = (
        "import sys, os, gc\nimport dali_pipes as dp\n"
        "loader = dp.loader(sys.argv[1], dp.segmentation(crop=16), batch_size=5, device='cpu'); next(loader)\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    del loader; gc.collect(); os._exit(7)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), len(list(loader)))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, small_shards], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["7", "4"], done.stderr


def test_loader_cannot_be_copied_or_pickled(small_shards: Path) -> None:
    """Sent to a worker process it would be of no use; the copy would close the original."""
    import copy
    import pickle

    with open_loader(small_shards) as loader:
        for send in (copy.copy, pickle.dumps):
            with pytest.raises(dp.WorkerProcessError, match="cannot be copied or sent to another process"):
                send(loader)
        assert len(keys_of(loader)) == 23
