"""Run all steps on one machine: pack photos, dSort, index, load with DALI and WebLoader; draw a picture, and report.

Each step calls a public function or runs a command that a user could run too.
"""

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from dali_pipes.errors import PipesError
from dali_pipes.formats.manifest import Manifest
from dali_pipes.formats.names import described, manifest_name
from dali_pipes.progress import current_verbosity, progress
from dali_pipes.store.cluster.ais import AisStore
from dali_pipes.store.cluster.endpoint import cluster
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.inspect.contact_sheet import Cell, contact_sheet, denormalised
from prep.pack.pack import PackJob, pack
from prep.shuffle.order import Algorithm
from prep.shuffle.request import Request
from prep.shuffle.shuffle import shuffle
from prep.sources.demo_photos import demo_photos

BUCKET = "dali-pipes-demo"
PACKED_PREFIX, SHUFFLED_PREFIX = "samples-", "shuffled-"
# WebLoader gives each worker whole shards, so there are several for each core of a laptop.
NUM_SHARDS = 8
SHEET_SAMPLES = 24
REPEATS = 3
# An epoch of 600 samples takes dali half a second. Three epochs give a stable figure, and add 10 s to the demo.
EPOCHS = 3
# The figures of the table. All of them are in report.json.
SHOWN = ("samples_per_s", "cpu_ms_per_sample", "time_to_first_batch_s", "loader_memory_mib")
CROP = 350
TRAIN_CROP, TRAIN_EPOCHS = 96, 8


@click.command(context_settings={"show_default": True})
@click.option(
    "--out",
    default="demo-out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the contact sheet, the report, the shards and the embedded node's storage go.",
)
@click.option("--samples", default=600, type=click.IntRange(min=16), help="Photos to cut and to load.")
@click.option(
    "--seed",
    default=7,
    type=click.IntRange(min=0),
    help="Fixes the photos, the shuffle and the order of loading.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object, in place of the table.")
@click.option(
    "--endpoint",
    envvar="AIS_ENDPOINT",
    show_envvar=True,
    help="AIStore's proxy; without one, an embedded node runs for as long as the demo.",
)
def demo(*, out: Path, samples: int, seed: int, as_json: bool, endpoint: str | None) -> None:
    """Pack real photos, dSort and index them in AIStore, load them through DALI and WebLoader, and compare.

    Reads the photographs that ship inside scikit-image. Writes to the bucket ais://dali-pipes-demo and to --out:
    contact-sheet.png, report.json and shards/; a second run makes them anew. The contact sheet is loaded from the
    bucket. Both loaders are timed on the copies in shards/, so that neither waits for a network that the other does not
    use.
    """
    from bench.tools.environment import check_extras

    check_extras()
    from bench.reports.record import write_record
    from bench.tools.processes import child_pids

    started = time.perf_counter()
    try:
        out.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=out).close()
    except OSError as exc:
        raise PipesError(f"cannot write into --out '{out}': {exc.strerror}; name another directory") from exc
    with ExitStack() as stack:
        others = child_pids()
        with _step("AIStore") as say:
            url = stack.enter_context(cluster(endpoint, embedded_dir=out / "ais"))
            say(f"{'embedded node' if endpoint is None else 'cluster'} at {url}")
        node = child_pids() - others
        shards, manifest = _make_and_load(AisStore(url, BUCKET), out, samples=samples, seed=seed)
        report = _compare_and_time(shards, seed=seed, bystanders=node)
    with _step("train") as say:
        say(_train(shards, seed=seed))
    report["demo"] = {
        "samples": manifest.num_samples,
        "seed": seed,
        "shards": list(manifest.names),
        "shard_bytes": manifest.total_bytes,
        "manifest_digest": manifest.digest,
        "elapsed_s": round(time.perf_counter() - started, 3),
    }
    write_record(report, out / "report.json")
    click.echo(json.dumps(report) if as_json else _summary(report, out))


def _make_and_load(store: AisStore, out: Path, *, samples: int, seed: int) -> tuple[ShardSet, Manifest]:
    with _step("photos") as say:
        photos = demo_photos(count=samples, seed=seed, show_progress=True)
        say(f"{len(photos.records)} with masks, cut from {len(photos.classes)} photographs of scikit-image")
    with _step("pack") as say:
        max_count = -(-samples // NUM_SHARDS)
        job = PackJob(store=store, prefix=PACKED_PREFIX, max_count=max_count, overwrite=True, show_progress=True)
        packed = pack(photos, job)
        say(f"{packed.num_samples} samples in {len(packed.shards)} shards, {packed.num_bytes / 2**20:.1f} MiB")
    with _step("dSort") as say:
        source = resolve_shards(store.locate(PACKED_PREFIX), endpoint=store.endpoint)
        order = Algorithm(seed=seed)
        shuffled = shuffle(
            Request(source, output_prefix=SHUFFLED_PREFIX, algorithm=order, overwrite=True, show_progress=True)
        )
        say(f"{shuffled.num_samples} samples shuffled into {len(shuffled.shards)} shards, none lost, none changed")
    with _step("index") as say:
        shards = resolve_shards(store.locate(SHUFFLED_PREFIX), endpoint=store.endpoint)
        manifest = index_shards(shards, show_progress=True)
        say(f"{manifest.num_samples} samples, manifest {store.locate(manifest_name(SHUFFLED_PREFIX))}")
    with _step("copy") as say:
        local = LocalStore(out / "shards")
        wanted, there = (
            [name for start in (SHUFFLED_PREFIX, described(SHUFFLED_PREFIX)) for name in place.list_names(start)]
            for place in (store, local)
        )
        for name in progress(wanted, what="copy", unit="object"):
            local.write(name, store.read(name))
        for name in set(there).difference(wanted):  # of an earlier run
            local.delete(name)
        say(f"{manifest.num_shards} shards to {out / 'shards'}")
    with _step("contact sheet") as say:
        say(str(_draw_sheet(shards, manifest, out / "contact-sheet.png", seed=seed)))
    return resolve_shards(out / "shards" / SHUFFLED_PREFIX, endpoint=None), manifest


def _draw_sheet(shards: ShardSet, manifest: Manifest, path: Path, *, seed: int) -> Path:
    """Draw the first samples of epoch 0, from the batches that a training step would get."""
    import dali_pipes as dp

    with dp.loader(
        [shards.store.locate(name) for name in shards.names],
        dp.segmentation(crop=CROP),
        batch_size=SHEET_SAMPLES,
        seed=seed,
        outputs=dp.Outputs(keys=True),
        endpoint=shards.store.endpoint,
    ) as loader:
        batch = next(iter(loader))[0]
        cells = [
            Cell(
                photo=denormalised(image, mean=dp.IMAGENET_MEAN, std=dp.IMAGENET_STD),
                mask=mask[0].numpy(),
                label=manifest.classes.get(label, str(label)),
                note=f"class {label}, {key}",
            )
            for image, mask, label, key in zip(
                batch["image"].cpu(), batch["mask"].cpu(), batch["label"].tolist(), batch["key"], strict=True
            )
        ]
    sheet = contact_sheet(
        cells,
        title="As the model sees them",
        subtitle=f"the first {len(cells)} of {manifest.num_samples} samples, epoch 0, seed {seed}: "
        f"centre crop {CROP}, normalisation undone; right, with the mask",
    )
    sheet.save(path)
    return path


def _train(shards: ShardSet, *, seed: int) -> str:
    """Train a small network to recognise the classes. Return a line with the share of photos that it recognised."""
    import torch
    from torch import nn

    import dali_pipes as dp

    torch.manual_seed(seed)
    graph, outputs = dp.classification_train(crop=TRAIN_CROP), dp.Outputs(labels="contiguous")
    with dp.loader(shards.url, graph, batch_size=32, seed=seed, outputs=outputs, device="cpu") as loader:
        layers = [nn.Conv2d(3, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.LazyLinear(len(loader.classes)))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
        batches, right = loader.as_dataloader(("image", "label")), []
        for _ in range(TRAIN_EPOCHS):
            right.append(0)
            for images, labels in batches:
                scores = model(images)
                optimizer.zero_grad()
                loss: Any = nn.functional.cross_entropy(scores, labels)
                loss.backward()
                optimizer.step()
                right[-1] += int((scores.argmax(1) == labels).sum())
        first, last = (f"{100 * number / loader.num_samples:.0f} %" for number in (right[0], right[-1]))
    return f"a small network: {first} of the photos right in epoch 1, {last} in epoch {TRAIN_EPOCHS}"


def _compare_and_time(shards: ShardSet, *, seed: int, bystanders: set[int]) -> dict[str, Any]:
    from bench.compare.run import LoaderScenario
    from bench.engine.scenario import run_scenario
    from bench.loaders.protocol import LoaderOptions
    from bench.loaders.registry import LoaderSpec
    from bench.loaders.workers import fitting_batch_size

    # 64 as in the benchmarks; less if a container has little shared memory for WebLoader's batches.
    options = LoaderOptions(seed=seed, crop=CROP)
    options = replace(options, batch_size=fitting_batch_size(options, num_shards=len(shards.names)))
    specs = [LoaderSpec(name="dali"), LoaderSpec(name="webloader")]
    scenario = LoaderScenario(
        shards=shards, loaders=specs, options=options, repeats=REPEATS, epochs=EPOCHS, bystanders=bystanders
    )
    with _step("compare and time") as say:
        report = run_scenario(scenario)
        say(f"{', '.join(spec.name for spec in specs)}: one epoch compared, {REPEATS} x {EPOCHS} timed each")
    return report


def _summary(report: dict[str, Any], out: Path) -> str:
    from bench.reports.tables import format_table

    records = report["records"]
    outputs = [record["outputs"] for record in records]
    largest = max(output["max_photo_difference"] for output in outputs)
    setting = records[0]["setting"]
    shards = shlex.quote(str(out / "shards"))
    program = f"{shlex.quote(sys.executable)} -m dali_pipes"  # also where the environment is not active
    return "\n".join(
        [
            "",
            f"dali and webloader gave the same {outputs[0]['num_samples']} samples, each once: keys, labels and masks "
            f"equal, photos within {largest:.1e} of Pillow and torchvision.",
            "",
            format_table(report, figures=SHOWN),
            "",
            f"Median of {REPEATS} runs of {EPOCHS} epochs after the first (smallest to largest), batch "
            f"{setting['batch_size']}, {setting['threads']} cores, {records[0]['device']}; shards on this machine for "
            "both.",
            "",
            f"{out / 'contact-sheet.png'}  the first samples as the model sees them",
            f"{out / 'report.json'}  these figures and where they come from",
            f"{out / 'shards'}  the shuffled shards",
            f"{report['demo']['elapsed_s']:.0f} s in all",
            "",
            "Next:",
            f"  {program} prep info {shards}",
            f"  {program} bench run --shards {shards}",
        ]
    )


@contextmanager
def _step(name: str) -> Iterator[Any]:
    """Print one line on stderr when a step is done: its name, its outcome, seconds."""
    started = time.perf_counter()
    outcome: list[str] = []
    yield outcome.append
    elapsed = time.perf_counter() - started
    if current_verbosity() != "quiet":
        click.echo(f"{click.style(name, bold=True)}: {outcome[0]} ({elapsed:.1f} s)", file=sys.stderr)
