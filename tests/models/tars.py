"""The reader gives the exact bytes of tars of any dialect; a loader follows any loop that a user may write."""

import io
import json
import string
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

import dali_pipes as dp
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from tests.models.world import build, draw_samples, open_probe, rows_of

LETTERS = [*string.ascii_letters, *string.digits, "-", "_", "é", "猫", " "]
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def draw_key(random: np.random.Generator, number: int, *, longest: int) -> str:
    """A key in up to two levels of folders; ``number`` makes it unique."""
    words = [
        "".join(random.choice(LETTERS, int(random.integers(1, longest)))).strip() or "w"
        for _ in range(int(random.integers(1, 4)))
    ]
    return "/".join([*words[:-1], f"{number}{words[-1]}"])


def reader(random: np.random.Generator, folder: Path) -> str:
    """Every component of every sample comes with the bytes that its tar holds, whatever wrote the tar."""
    folder.mkdir(exist_ok=True)
    kind = list(FORMATS)[random.integers(3)]
    truth: dict[str, dict[str, bytes]] = {}
    names = ["bin", "a.bin", "b.seg.png"][: int(random.integers(1, 4))]
    for shard in range(int(random.integers(1, 4))):
        with tarfile.open(folder / f"s-{shard:06d}.tar", "w", format=FORMATS[kind]) as archive:
            for _ in range(int(random.integers(1, 12))):
                key = draw_key(random, len(truth), longest=12 if kind == "ustar" else 60)
                components = {
                    name: random.bytes(int(random.choice([1, 2, 511, 512, 513, random.integers(1, 20_000)])))
                    for name in random.permutation([*names, "left.out"]).tolist()
                }
                if random.integers(8) == 0:
                    archive.addfile(directory_entry(f"folder{len(truth)}"))
                for name, data in components.items():
                    member = tarfile.TarInfo(f"{key}.{name}")
                    member.size, member.mode, member.mtime = len(data), int(random.choice([0, 0o644, 0o777])), 1.5e9
                    member.uname = "".join(random.choice(LETTERS, 8))
                    if kind == "pax" and random.integers(2):
                        member.pax_headers = {"comment": "x" * int(random.integers(1, 2000))}
                    archive.addfile(member, io.BytesIO(data))
                truth[key] = components
    index_shards(resolve_shards(folder, endpoint=None))

    def graph(components: dp.Components, random: dp.Random) -> dict[str, Any]:
        from nvidia.dali import fn

        parts = {f"part{number}": components[name] for number, name in enumerate(names)}
        padded = {name: fn.pad(part, fill_value=0) for name, part in parts.items()}
        return padded | {f"length{name[4:]}": part.shape() for name, part in parts.items()}

    found: dict[str, dict[str, bytes]] = {}
    options: dict[str, Any] = {"batch_size": int(random.integers(1, 9)), "seed": 1, "device": "cpu"}
    with dp.loader(str(folder), graph, outputs=dp.Outputs(keys=True), **options) as loader:
        for batch in loader.as_dicts():
            for row, key in enumerate(batch["key"]):
                assert key not in found
                found[key] = {}
                for number, name in enumerate(names):
                    length = int(batch[f"length{number}"][row].flatten()[0])
                    found[key][name] = bytes(batch[f"part{number}"][row][:length].numpy())
    assert found == {key: {name: parts[name] for name in names} for key, parts in truth.items()}
    return f"{len(truth)} samples, {kind}, {names}"


def directory_entry(name: str) -> tarfile.TarInfo:
    """The entry of a folder, as tar programs write it."""
    entry = tarfile.TarInfo(name)
    entry.type = tarfile.DIRTYPE
    return entry


def loops(random: np.random.Generator, folder: Path) -> str:
    """A loader has one position, whoever moves it: the loader itself, a face, a state, `reset` or `set_epoch`."""
    world = build(folder / "world", draw_samples(random, int(random.integers(6, 30))), random)
    batch_size = int(random.integers(1, 8))
    options: dict[str, Any] = {"batch_size": batch_size, "seed": int(random.integers(100))}
    orders: list[list[str]] = []
    with open_probe(world.url, **options) as loader:
        for epoch in range(24):
            loader.set_epoch(epoch)
            orders.append([row.key for batch in loader for row in rows_of(batch[0], world)])
    loader = open_probe(world.url, **options)
    epoch = given = 0  # `given`: samples of this epoch that were delivered
    said: list[str] = []
    old: Any = None
    begun = parted = False  # whether the loader's own loop has begun; whether a face has taken a batch since
    try:
        for _ in range(int(random.integers(3, 14))):
            act = ("take", "next", "reset", "epoch", "load", "reopen", "loop", "dicts", "dataset")[random.integers(9)]
            said.append(act)
            where = (said, batch_size, epoch, given)
            if act in ("epoch", "load", "reopen") or (act == "reset" and given):
                parted = False
            if act == "reset":
                loader.reset()
                epoch, given = (epoch + 1, 0) if given else (epoch, 0)
            elif act == "epoch":
                epoch, batch = int(random.integers(4)), int(random.integers(len(loader) + 1))
                loader.set_epoch(epoch, batch=batch)
                given = min(batch * batch_size, len(world.samples))
            elif act == "load":
                loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
            elif act == "reopen":
                state = json.loads(json.dumps(loader.state_dict()))
                loader.close()
                loader, old, begun = open_probe(world.url, state=state, **options), None, False
            elif act == "next" and begun and parted:
                try:
                    next(loader)
                except RuntimeError:
                    pass
                else:
                    raise AssertionError(f"the loader's own loop goes on after a face: {where}")
            elif act == "next" and given < len(world.samples):
                begun, parted = True, False
                found = [row.key for row in rows_of(next(loader)[0], world)]
                assert found == orders[epoch][given : given + len(found)], where
                given += len(found)
            elif act in ("take", "loop", "dicts", "dataset"):
                if given == len(world.samples):  # at the end of an epoch, `set_epoch` starts the next
                    epoch, given = epoch + 1, 0
                    loader.set_epoch(epoch)
                if act in ("dataset", "dicts") and given:
                    epoch, given = epoch + 1, 0
                    loader.set_epoch(epoch)
                newer = iter(
                    loader if act in ("take", "loop") else loader.as_dicts() if act == "dicts" else loader.as_dataset()
                )
                begun, parted = (True, False) if act in ("take", "loop") else (begun, True)
                most = 1_000_000 if act == "loop" else int(random.integers(1, 4))
                is_over = False
                for _ in range(most):
                    batch = next(newer, None)
                    if batch is None:
                        is_over = True
                        break
                    found = [row.key for row in rows_of(batch[0] if isinstance(batch, list) else batch, world)]
                    assert found == orders[epoch][given : given + len(found)], where
                    assert found, where
                    given += len(found)
                if is_over:
                    assert given == len(world.samples), where
                    epoch, given, parted = epoch + 1, 0, False
                    loader.set_epoch(epoch)
                if old is not None and given:
                    try:
                        next(old)
                    except (RuntimeError, StopIteration):
                        pass
                    else:
                        raise AssertionError(f"an older iteration goes on: {where}")
                if act in ("dicts", "dataset"):
                    old = newer
            assert loader.epoch == epoch, where
    finally:
        loader.close()
    return f"{len(world.samples)} samples, {batch_size}: {said}"
