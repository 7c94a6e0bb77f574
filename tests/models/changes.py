"""Changes of data sets: samples are added and removed in versions, and bad photos are listed."""

import contextlib
import io
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import dali_pipes as dp
from dali_pipes.cli import main
from tests.models.world import Truth, World, build, draw_samples, photo_of


def command(*arguments: str) -> str:
    """Run a command of this project in this process, and return what it printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        code = main([*arguments])
    assert code == 0, (arguments, printed.getvalue())
    return printed.getvalue()


def whole(components: dp.Components, random: dp.Random) -> dict[str, Any]:
    """The photo's mean colour and its label."""
    from nvidia.dali import fn, types

    image = fn.decoders.image(components["png"], device=components.device, output_type=types.RGB)
    return {"colour": fn.reductions.mean(fn.cast(image, dtype=types.FLOAT), axes=(0, 1)), "label": components.label}


def contents(url: str, **options: Any) -> list[tuple[str, int, int]]:
    """The key, the number in the photo's colour and the class of each sample of an epoch, in order."""
    found = []
    usual = {"batch_size": 7, "device": "cpu", "shuffle": False, "outputs": dp.Outputs(keys=True)}
    with dp.loader(url, whole, **(usual | options)) as loader:
        for (batch,) in loader:
            for key, colour, label in zip(batch["key"], batch["colour"], batch["label"].tolist(), strict=True):
                red, green, _ = colour.round().tolist()
                found.append((key, int(red + 256 * green), label))
    return found


def versions(random: np.random.Generator, folder: Path) -> str:
    """A version holds the samples that a user added and did not remove, in order; older versions do not change."""
    names = ["cat", "dog", "fox", "owl"]
    source, url = folder / "source", f"{folder}/data/animals-"
    numbers = iter(range(10_000))
    ids: dict[str, int] = {}
    present: list[tuple[str, int, int]] = []
    known: dict[int, list[tuple[str, int, int]]] = {}
    said = []

    def add(first: bool) -> None:
        classes = sorted({names[number] for number in random.integers(0, 4, int(random.integers(1, 4)))})
        directory = source / str(len(known))
        added = []
        for name in classes:
            (directory / name).mkdir(parents=True)
            for _ in range(int(random.integers(1, 6))):
                number = next(numbers)
                height, width = (int(side) for side in random.integers(8, 30, 2))
                (directory / name / f"{number:05d}.png").write_bytes(photo_of(number, height, width))
                added.append((f"{name}/{number:05d}", number, name))
        for name in classes:
            ids.setdefault(name, len(ids))
        present.extend((key, number, ids[name]) for key, number, name in sorted(added))
        count = str(int(random.integers(1, 9)))
        if first:
            command("prep", "pack", "imagefolder", str(directory), url, "--max-count", count)
            command("prep", "index", url)
        else:
            command("prep", "add", str(directory), url)

    def remove() -> None:
        chosen = [row for row in present if random.random() < 0.3][: len(present) - 1]
        if chosen:
            command("prep", "remove", url, *(word for key, _, _ in chosen for word in ("--key", key)))
            for row in chosen:
                present.remove(row)

    add(True)
    known[1] = list(present)
    for _ in range(int(random.integers(2, 6))):
        kind = int(random.integers(3))
        before, num_versions = sorted(present), max(known)
        (lambda: add(False), remove, lambda: command("prep", "compact", url))[kind]()
        log = command("prep", "log", url)
        newest = max(int(line[1:].split()[0]) for line in log.splitlines() if line.startswith("@"))
        assert newest - num_versions in ((1,) if sorted(present) != before else (0, 1))
        known[newest] = list(present)
        said.append(("add", "remove", "compact")[kind])
    for version, rows in known.items():
        found = contents(f"{url}@{version}")
        assert sorted(found) == sorted(rows), (version, said)
        if "compact" not in said:
            assert found == rows, (version, said)
    assert sorted(contents(url)) == sorted(present)
    return f"{said}: {len(present)} samples"


def _cut(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _spoilt(data: bytes) -> bytes:
    """A PNG whose pixel data cannot be inflated, although its chunk has the right checksum."""
    import zlib

    start = data.index(b"IDAT") + 4
    size = int.from_bytes(data[start - 8 : start - 4], "big")
    body = bytes(255 for _ in range(size))
    return data[:start] + body + zlib.crc32(b"IDAT" + body).to_bytes(4, "big") + data[start + size + 4 :]


DAMAGES: tuple[Callable[[bytes], bytes], ...] = (
    _cut,
    _spoilt,
    lambda data: b"GIF89a" + data[6:],
    lambda data: b"",
    lambda data: b"x" * len(data),
)


def in_shards_of(keys: Sequence[str], world: World) -> set[str]:
    """All keys of the shards that these are in."""
    shards = {shard for key, shard in zip(world.keys, world.shard_of, strict=True) if key in keys}
    return {key for key, shard in zip(world.keys, world.shard_of, strict=True) if shard in shards}


def bad_samples(random: np.random.Generator, folder: Path) -> str:
    """A neighbour replaces each bad photo, and nothing else changes; the key is listed and can be excluded."""
    samples = draw_samples(random, int(random.integers(6, 40)))
    share = float(random.choice([0.05, 0.2, 0.6]))
    bad = {number for number in range(len(samples)) if random.random() < share}
    bad -= {int(random.integers(len(samples)))}
    damaged: list[Truth] = [
        Truth(sample.key, sample.label, sample.height, sample.width, DAMAGES[random.integers(5)](sample.photo), b"x")
        if number in bad
        else sample
        for number, sample in enumerate(samples)
    ]
    world = build(folder / "world", damaged, random)
    batch_size, seed = int(random.integers(2, 9)), int(random.integers(100))
    quarantine = folder / "bad.tsv"
    outputs = dp.Outputs(keys=True, valid=True)

    def order_graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        return {"size": components["txt"].shape()}

    with dp.loader(world.url, order_graph, batch_size=batch_size, device="cpu", seed=seed, outputs=outputs) as loader:
        planned = [batch[0]["key"] for batch in loader]
    number_of = {sample.key: number for number, sample in enumerate(world.samples)}
    bad_keys = {world.keys[number] for number in bad}
    policy = dp.BadSamples(on_error="substitute", quarantine=quarantine)
    options = {"batch_size": batch_size, "device": "cpu", "seed": seed, "bad_samples": policy, "outputs": outputs}
    with dp.loader(world.url, whole, **options) as loader:
        for planned_keys in planned:
            (batch,) = next(loader)
            good = [position for position, key in enumerate(planned_keys) if number_of[key] not in bad]
            for position, key in enumerate(planned_keys):
                if position in good:
                    expected, is_valid = key, True
                else:
                    before = [other for other in good if other < position]
                    after = [other for other in good if other > position]
                    taken = before[-1] if before else after[0] if after else None
                    expected = planned_keys[taken] if taken is not None else batch["key"][position]
                    if taken is None and (near := in_shards_of(planned_keys, world) - bad_keys):
                        assert expected in near
                    is_valid = False
                truth = world.samples[number_of[expected]]
                red, green, _ = batch["colour"][position].round().tolist()
                assert number_of[expected] not in bad
                assert batch["key"][position] == expected
                assert int(red + 256 * green) == number_of[expected]
                assert int(batch["label"][position]) == truth.label
                assert bool(batch["valid"][position]) is is_valid, (key, planned_keys)
        assert {sample.key for sample in loader.bad_samples} == bad_keys
    if not bad:
        assert not quarantine.exists()
        return "no bad sample"
    assert sorted(
        line.split("\t")[1]
        for line in quarantine.read_text().splitlines()
        if "\t" in line and not line.startswith("#") and line.split("\t")[1] in number_of
    ) == sorted(bad_keys)
    rest = contents(world.url, select=dp.Select(exclude=quarantine))
    assert Counter(key for key, _, _ in rest) == Counter(
        sample.key for number, sample in enumerate(world.samples) if number not in bad
    )
    return f"{len(bad)} bad of {len(samples)}"
