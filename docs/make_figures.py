"""Measure the figures of README and docs/figures.md anew, at one commit: ``make figures PETS=~/pets``.

A scenario is a command of `dali-pipes bench`, and its record is ``bench/results/NAME.json``. A record that this commit
made with the same options is kept, so after an interruption the same command goes on; documents, records and tests may
change in between.
``--only`` measures a part and updates no document. Otherwise it names at the end the scenarios that it could not
measure; if there are none, it updates the tables of the documents. `aistore` is left as it is without AIS_ENDPOINT.
It changes tables only. Sentences that name figures are to be read again, also in docs/comparison.md and docs/dgx.md.

PETS is a folder with the Oxford-IIIT Pet data set, ``images/*.jpg`` and ``annotations/trimaps/*.png``, or a part of it.
The peers' packages are in `.venv-figures`; LitData and Streaming want older versions of some that we have.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.tools.environment import describe_commit  # noqa: E402
from bench.tools.repeat import repeat_shards  # noqa: E402
from dali_pipes.store.urls import open_store, resolve_shards  # noqa: E402
from prep.index import index_shards  # noqa: E402
from tests.servers.clouds import s3_cloud  # noqa: E402

RESULTS, WORK = ROOT / "bench" / "results", ROOT / ".figures"
DOCUMENTS = ("README.md", "docs/figures.md")
# A multiple of the batch size, 64: DALI's reader fills its last batch with further samples.
NUM_SAMPLES, NUM_SHARDS = 1152, 8
# A run from a bucket has one epoch, opening included. So the epoch is long, with more shards than are fetched at once.
IN_BUCKET_SAMPLES, IN_BUCKET_SHARDS = 4608, 32
_SETS = (("local", NUM_SAMPLES, NUM_SHARDS), ("bucket", IN_BUCKET_SAMPLES, IN_BUCKET_SHARDS))
PROGRAM = (sys.executable, "-m", "dali_pipes")

_SERVED = "dali,dali-external,dali-webdataset,webloader:turbo,webloader:nvimgcodec,spdl:turbo,spdl:nvimgcodec"
_OTHERS = "dali,memory,spdl:nvimgcodec,litdata:nvimgcodec,mosaic:nvimgcodec,energon:nvimgcodec"
_FEW = "dali,dali-webdataset,webloader:nvimgcodec,spdl:nvimgcodec"
_BEST = "dali,dali-webdataset,spdl:nvimgcodec"
_COLD = "dali,dali-external,webloader:nvimgcodec,spdl:nvimgcodec"
_IN_BUCKET = "dali,dali-s3,dali-external,webloader{0},spdl{0},s3torchconnector{0},litdata-s3{0},mosaic-s3{0}"
_REPEATS = "--repeats 15"  # of each loader, and up to 75 as long as an interval is wider than 10 %
_PETS = f"--shards {{pets}} --baseline spdl:nvimgcodec {_REPEATS} --recipe"
_EPOCHS = "--samples 2304"  # twice the samples: long against the beginning of an epoch

SCENARIOS: Mapping[str, str] = {
    # The recipes, warm.
    "classification": f"run {_PETS} classification --loaders {_SERVED} {_EPOCHS}",
    "segmentation": f"run {_PETS} segmentation --loaders {_SERVED} {_EPOCHS}",
    "evaluation": f"run {_PETS} evaluation --loaders {_FEW}",
    "uint8": f"run {_PETS} classification --loaders {_FEW} {_EPOCHS} --dtype uint8",
    "others": f"run {_PETS} classification --loaders {_OTHERS} {_EPOCHS}",
    # From a bucket: decoded, then encoded. A round with decoding takes up to two minutes, so it has the default, 7.
    "bucket": f"run --shards {{s3}} --recipe classification --loaders {_IN_BUCKET.format(':nvimgcodec')} "
    "--baseline webloader:nvimgcodec --cache cold",
    "bucket-encoded": f"run --shards {{s3}} --recipe encoded --loaders obstore,{_IN_BUCKET.format('')} "
    f"--baseline obstore --cache cold {_REPEATS}",
    "aistore": "run --shards {ais} --endpoint {endpoint} --recipe classification --loaders "
    f"aistore:nvimgcodec,{_COLD} --baseline spdl:nvimgcodec {_REPEATS}",
    "cold": f"run {_PETS} classification --loaders {_COLD} {_EPOCHS} --cache cold",
    # As many shards as 1 to 6 accelerators can share evenly.
    "au": "run --shards {pets} --au resnet50_h100 --au-most 6 --loaders dali,dali-webdataset,dali-external,"
    "webloader:nvimgcodec,spdl:nvimgcodec --samples 23040 --num-shards 120",
    # Parts, without decoding.
    "feed": "feed --masks without --batch-sizes 64,256 --passes 24 "
    f"--loaders dali-pipes,dali-webdataset,dali-webdataset-read,preadv {_REPEATS}",
    "fetch": f"fetch {_REPEATS}",
    "windows": "windows --repeats 3",
    # Other photos, batches, ranks and distances.
    "small-photos": f"run {_PETS} classification --loaders {_BEST} --photo-side 250 --samples 4608",
    "large-photos": f"run {_PETS} classification --loaders {_BEST} --photo-side 1800",
    "batch-size": f"sweep {_PETS} classification --loaders {_BEST} {_EPOCHS} --over batch-size=16,256",
    "ranks": f"sweep {_PETS} classification --loaders {_BEST} {_EPOCHS} --over ranks=1,2",
    "latency": f"sweep {_PETS} classification --loaders {_COLD} --cache cold --latency-ms 100 --over threads=2,8",
    "open": "open --repeats 3",
}


def main() -> int:
    options = argparse.ArgumentParser(description="Measure the figures of the documents anew.")
    options.add_argument("--pets", type=Path, required=True, help="folder of the Oxford-IIIT Pet data set")
    options.add_argument("--only", nargs="+", choices=list(SCENARIOS), help="these scenarios; updates no document")
    given = options.parse_args()
    if (commit := describe_commit())["is_dirty"] is not False:
        options.error("figures belong to a commit: commit your changes first")
    if not (given.pets / "images").is_dir():
        options.error(f"--pets '{given.pets}': expected a folder with images/ and annotations/trimaps/")
    missing = []
    with _data(given.pets) as places:
        for name, command in SCENARIOS.items():
            if (given.only and name not in given.only) or _is_made(name, commit["commit"]):
                continue
            if "{ais}" in command and "ais" not in places:
                click.echo(f"{name}: without AIS_ENDPOINT its record stays as it is")
            elif not _measured(name, command.format(**places)):
                missing.append(name)
    if missing:
        click.echo(f"not measured: {', '.join(missing)}; run the same command on a quieter machine", err=True)
    elif given.only is None:
        updates = [argument for document in DOCUMENTS for argument in ("--update", str(ROOT / document))]
        subprocess.run([*PROGRAM, "bench", "report", *updates], check=True)  # noqa: S603
    return int(bool(missing))


@contextmanager
def _data(pets: Path) -> Iterator[dict[str, str]]:
    """Yield where the shards lie: in a directory, in a bucket of S3, and of AIStore if AIS_ENDPOINT names one.

    The bucket in AIStore is one of its own, which stays there.
    """
    digest = hashlib.sha256(repr((str(pets.resolve()), _SETS)).encode()).hexdigest()[:8]
    sets, in_aistore = WORK / f"sets-{digest}", f"ais://dali-pipes-figures-{digest}/"
    if not sets.is_dir():
        for folder in ("packed", "making"):
            shutil.rmtree(WORK / folder, ignore_errors=True)
            (WORK / folder).mkdir(parents=True)
        command = [*PROGRAM, "prep", "pack", "pets", str(pets), str(WORK / "packed"), "--max-count", "30"]
        subprocess.run(command, check=True)  # noqa: S603
        packed = resolve_shards(str(WORK / "packed"), endpoint=None)
        for name, num_samples, num_shards in _SETS:
            making = WORK / "making" / name
            making.mkdir()
            index_shards(repeat_shards(packed, directory=making, num_samples=num_samples, num_shards=num_shards))
        (WORK / "making").rename(sets)
    shutil.rmtree(WORK / "s3", ignore_errors=True)
    (WORK / "s3").mkdir()
    endpoint = os.environ.pop("AIS_ENDPOINT", None)  # with it, s3:// would be a bucket of the cluster
    with s3_cloud(WORK / "s3") as cloud:
        os.environ.update(cloud.environment)
        cloud.make_bucket("pets")
        places = {"pets": str(sets / "local"), "s3": "s3://pets/"} | (
            {"ais": in_aistore, "endpoint": endpoint} if endpoint else {}
        )
        for url, server in [("s3://pets/", None)] + ([(in_aistore, endpoint)] if endpoint else []):
            store = open_store(url, endpoint=server)[0]
            store.create()
            for path in (sets / "bucket").glob("*.tar"):
                store.upload(path.name, path)
            index_shards(resolve_shards(url, endpoint=server))
        yield places


def _is_made(name: str, commit: str) -> bool:
    """Return whether there is a record of this commit that was made with the scenario's options.

    Paths and addresses are not compared, because a record shortens them.
    """
    path = RESULTS / f"{name}.json"
    if not path.is_file():
        return False
    record = json.loads(path.read_text())
    made, wanted = (
        {word for word in words.split() if not {"{", "/"} & set(word)}
        for words in (record["command"], f"dali-pipes bench {SCENARIOS[name]} --publish --json")
    )
    return record["environment"]["commit"] == commit and made == wanted


def _measured(name: str, command: str) -> bool:
    """Run a scenario. Return whether its record was written."""
    words = [*PROGRAM, "bench", *command.split(), "--publish", "--json", str(RESULTS / f"{name}.json")]
    click.echo(f"\n{name}: bench {command}")
    began = time.monotonic()
    done = subprocess.run(words, check=False)  # noqa: S603
    click.echo(f"{name}: {(time.monotonic() - began) / 60:.0f} minutes, exit code {done.returncode}")
    return done.returncode == 0


if __name__ == "__main__":
    sys.exit(main())
