"""Arguments, options and files that commands and functions refuse; the message says which, and what was expected."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click import UsageError
from click.testing import CliRunner

import dali_pipes as dp
from bench.compare.settings import TurnSetting, sweep
from bench.loaders import encoded, protocol, registry, s3, workers
from bench.reports.regression import compare_runs
from bench.tools import environment, gateway
from dali_pipes.cli import cli
from dali_pipes.data_set import indexing, named
from dali_pipes.errors import DataError, PipesError, StoreError
from dali_pipes.formats.names import recoded_name
from dali_pipes.processes.ranks import find_rank
from dali_pipes.store.local import LocalStore
from dali_pipes.store.shard_set import ShardSet
from prep.pack.pack import PackJob
from prep.shuffle.key_map import Grouping, group_by, parse_key_map
from prep.shuffle.request import Request, load_key_map, parse_spec
from prep.sources import demo_photos, folders, hf
from prep.versions.publish import open_newest
from prep.workers import on_ray
from tests.bench.reports.test_regression import BEFORE
from tests.lazy import Lazy
from tests.loaders import open_loader
from tests.prep.shuffle.test_specs import SPEC
from tests.shards import Sample, write_shards

HERE, OPTIONS = LocalStore(Path("/")), protocol.LoaderOptions(device="cpu")
PLAIN, KEY_MAP = ShardSet(store=HERE, names=["a.tar"]), b"a\tto-{0..0}\nb\tto-{0..0}"
readers, color = Lazy("bench.loaders.peers.dali_readers"), Lazy("dali_pipes.graph.color")
FOLDERS, HALVES = Grouping(by="folder"), Grouping(by="split", shares={"a": 0.5, "b": 0.5})


def command(first: str) -> Any:
    """Run a command of these first words and others; its errors are raised."""
    return lambda words: CliRunner().invoke(cli, f"{first} {words}", catch_exceptions=False, standalone_mode=False)


# An error; a function or a command; arguments or further words, each with a part of the message.
# fmt: off
CASES = [
    (UsageError, command(""), {
        "make a b": "no command 'make'; did you mean 'cli prep make'?", "zz": "no command 'zz'; there are bench, cache",
        "prep mkae a b": "no command 'mkae'; did you mean 'cli prep make'?", "doctr": "did you mean 'cli doctor'?"}),
    (UsageError, command("prep view set"), {
        "": "Missing argument 'OUT'", "a.png --keys ,": "got ','", "none/a.png": "no directory 'none'; make it",
        "a.png --quarantine bad.tsv": "--quarantine is for a page: name one", "a.txt": ".jpg or .webp, got 'a.txt'",
        "a.png --keys k1 --where-label 1": "--keys and --where-label exclude each other"}),
    (UsageError, command("prep verify set"), {
        # The second would be a very long list.
        "--mask-values 1,x": "numbers from 0 to 255 such as '1,2,3' or '0-20,255', got '1,x'",
        "--mask-values 0-9999999999": "from 0 to 255", "--no-masks --mask-values 0-1": "and --mask-values exclude",
        "--no-masks --mask x": "--no-masks and --mask exclude"}),
    (UsageError, command("prep shuffle"), {
        "--spec x ais://b/a- --seed 1": "drop URL, --seed, or write it", "x --ekm a --by class": "are two ways",
        "x --epoch 1 --ekm m": "not go with --ekm, which names", "x --ekm m --output x-": "drop --output",
        "x --splits a=1": "--splits goes with --by split", "x --by split --splits a=x": "train=0.9,val=0.1, got 'a=x'",
        "x --by split --splits a": "train=0.9,val=0.1, got 'a'"}),
    (UsageError, command("prep recode set o"), {
        "": "nothing to do; give", "--optimize --quality 8": "--quality is", "--convert --masks nearest": "--masks"}),
    (UsageError, command("prep info set --buckets"), {
        "x=1": "got 'x=1'", "area=a": "area must be a number, got 'a'", "step=8": "area is missing", "area=1": "area"}),
    (UsageError, command("prep"), {
        "embedded": "Missing parameter: directory", "pack demo x --max-bytes 64M": "and one of B, KiB, ",
        "pack table x.csv o --component path": "NAME=COLUMN, got 'path'", "remove set": "with --key or --list",
        "pack table x.csv o --value a=b --value a=c": "'a' is given twice",
        "index x --overwrite --part 1/2": "a part writes none",
        "etl get ais://b/x.tar none/f --function pets": "no directory 'none'"}),
    (UsageError, command("bench gpu --sweep"), {"x=1": "got 'x=1'", "batch-size=1,a": "'a' is not a valid integer"}),
    (ValueError, command("bench"), {
        "feed --loaders x": "got 'x'", "feed --batch-sizes 0": "at least 1, got 0", "feed --photo-kb 1,1": "got '1,1'",
        "gpu --all": "needs -o DIR", "gpu --scenarios x": "got x", "gpu --json plain/a -o plain": "one scenario",
        "report": "name at least one record", "report --check": "goes with --update", "open --faces x": "got 'x'",
        "report --update x --loaders x": "apply to RECORDs", "open --ranks a": "--ranks must be whole numbers",
        "open --ranks 0": "got 0", "windows --fractions 2": "in (0, 1], each once", "fetch --clients x": "got 'x'",
        "resume --shards set --cold-windows 41": "cold_shards=40, got 41", "fetch --clients curl": "no such program"}),
    (ValueError, command("bench run --shards set"), {
        "--au-most 3": "--au-most needs --au", "--au x --ranks 2": "excludes --ranks", "--au x": "got 'x'",
        "--au a:2:0.1 --au-most 99": "at most 64, got 99", "--au a:64:0.1": "an epoch, 128 samples; the shards hold 23",
        "--samples 2": "4 shards need as many", "--work /none": "no such directory", "--baseline x": "got 'x'",
        "--baseline synthetic": "must be one of the loaders", "--recipe encoded --mask m": "no mask, got --mask 'm'"}),
    (DataError, command("bench"), {
        "run --shards plain": "no sample has a label", "run --shards set/s-@1": "name it without @1",
        "resume --shards set": "less than three batches",
        "feed --photo x --masks without --shards set": "no component 'x' (found: ",
        "feed --masks with --shards plain": "no component is a mask by its name; name it: --mask"}),
    (DataError, command("prep"), {
        "view set plain/a.png --where-label 99": "set/s-' is of class 99", "view empty a.png": "no sample to show",
        "pack table long.csv o": "'long.csv' cannot be read as CSV: field"}),
    (ValueError, command(""), {"cache ls --cache plain/none": "'plain/none' does not exist",
        "prep pack table a.csv o --unlabelled --mask m": "mask 'm' is not a component (found: jpg)"}),
    (PipesError, command("demo --out"), {"/proc/x": "cannot write into --out '/proc/x'"}),
    (ValueError, lambda text: sweep(TurnSetting(), [text]), {
        "x=1": "got 'x=1'", "ranks=a": "numbers separated by commas, got 'a'", "threads=0": "must be at least 1, got 0",
        "ranks=999": "at most 64, got 999", "cache=x": "got 'x'", "latency_ms=-1": "in [0, 60000), got -1"}),
    (ValueError, lambda options: compare_runs(BEFORE, BEFORE, **json.loads(options)), {
        '{"figures": ["x"]}': "got 'x'", '{"figures": ["fetched_ratio"]}': "none of fetched_ratio was measured",
        '{"threshold": -1}': "at least 0, got -1", '{"relative_to": "x"}': "got 'x'; before are: dali"}),
    (ValueError, lambda key: compare_runs(BEFORE, BEFORE | {key: []}), {"records": "no loader was timed under the"}),
    (ValueError, gateway.check_upstream, {"https://x": "http://HOST:PORT, got the endpoint 'https://x'"}),
    (PipesError, lambda name: registry.select_loaders([name], shards=PLAIN), {"dali-s3": "bucket of S3, got '/a'"}),
    (PipesError, lambda name: registry.prepare_loader(name, PLAIN, directory=Path()), {"dali-s3": "S3, got '/a'"}),
    (PipesError, lambda num: workers.check_shared_memory(int(num), options=OPTIONS), {"9" * 9: "up to 999999999 samp"}),
    (DataError, lambda key: readers.webdataset_index(SimpleNamespace(shard="s", keys=[key])), {"a b": "key 'a b'"}),
    (StoreError, lambda url: readers._check_reads_ranges(url), {"http://127.0.0.1:1/": "a ranged GET failed ("}),
    (ValueError, lambda text: registry.select_loaders([text] * 2), {"dali": "'dali' twice", "dali:x": "DALI alone"}),
    (DataError, lambda key: encoded.components_of({"__key__": key}, OPTIONS), {"k": "key 'k': no component"}),
    (DataError, lambda key: encoded.label_of(b"x", key=key), {"k": "key 'k': cls must be a number, got b'x'"}),
    (ValueError, lambda spec: parse_spec(SPEC | json.loads(spec)).input_names, {
        '{"input_bck": {"namespace": {"x": "n"}}}': "got {'x': 'n'}",
        '{"algorithm": {"content_key_type": "x"}}': "key type must be",
        '{"output_format": "out"}': "a range of numbers", '{"algorithm": {"kind": "x"}}': "algorithm must be one of",
        '{"input_bck": {}}': "input_bck.name is missing", '{"output_format": "o{0..9999999999999999999}"}': "too long",
        '{"input_format": {"template": "a-{0..9999999}"}}': "more than 1,000,000 shards"}),
    (StoreError, lambda url: load_key_map(url, endpoint=None), {
        "http://127.0.0.1:1/m": "cannot read key map: ", "/none": "cannot read key map '/none': No such file"}),
    (ValueError, lambda given: Grouping(**json.loads(given)), {
        '{"by": "size"}': "must be one of class, balanced, folder, split, got", '{"by": "split"}': "needs shares",
        '{"by": "split", "shares": {"a": 0.5, "b": 0.4}}': "shares must be positive and sum up to 1",
        '{"by": "split", "shares": {"a": NaN, "b": 1.0}}': "shares must be positive and sum up to 1",
        '{"by": "split", "shares": {"a/b": 1.0}}': "a split's name may hold only letters"}),
    (DataError, lambda name: group_by([name], grouping=FOLDERS, prefix=""), {"a.x": "key 'a' has", "é/a.x": "'é'"}),
    (DataError, lambda name: group_by([name], grouping=HALVES, prefix="x-"), {"a.x": "gets none of 1 samples"}),
    (DataError, lambda key: parse_key_map(f"{key}\tx\n{key}\ty".encode(), where="m"), {"a": "key 'a' occurs twice"}),
    (DataError, lambda name: parse_key_map(KEY_MAP, where=name).cut([0, 0], [9, 9], target=1), {"m": "m: number of"}),
    (ValueError, lambda names: Request(ShardSet(store=HERE, names=names.split())), {
        "a.zip": "one of .tar, .tgz, .tar.gz, got 'a.zip'", "a.tar b.tgz": "must all end alike, got .tar"}),
    (ValueError, lambda given: Request(PLAIN, **json.loads(given)), {
        '{"shard_bytes": 0}': "got 0", '{"engine": "x"}': "got 'x'"}),
    (ValueError, lambda path: PackJob(store=LocalStore(Path(path)), copy=Path(path)), {"plain": "got 'plain' twice"}),
    (ValueError, lambda prefix: PackJob(store=HERE, prefix=prefix), {"a1": "'train/samples-', got 'a1'"}),
    (DataError, lambda path: folders.imagefolder(Path(path)), {"plain/cat": "no folder", "plain": "no photo: "}),
    (DataError, lambda path: folders._read_rows(Path(path)), {"/none": "'/none', which names the records"}),
    (DataError, lambda path: hf.find_parquet([Path(path)]), {"plain": "holds no .parquet; name the files"}),
    (PipesError, demo_photos._read_photograph, {"none.png": "are cut from 'none.png' of scikit-image"}),
    (PipesError, lambda path: on_ray._read_environment(Path(path)), {"/none": "/none", "plain/cat/a": "'text'"}),
    (ValueError, lambda url: open_newest(url, endpoint=None), {"set/s-@1": "version", "set/s-000000": "of 4"}),
    (DataError, lambda url: open_newest(url, endpoint=None), {"plain/s-": "no manifest, so it has no versions"}),
    (ValueError, lambda url: named.known_shards(url, endpoint=None, etl="e"), {"set/s-@1": "leave out '@1'"}),
    (ValueError, lambda url: named.list_shards([url] * 2, endpoint=None), {"set/s-@1": "1 more URLs are named"}),
    (ValueError, lambda url: named.list_shards(url, endpoint="http://x"), {"ais://b/a-{0..1}.tar@2": "leave out '@2'"}),
    (DataError, lambda path: indexing.read_recoded(LocalStore(Path(path)), "r-"), {"plain": "expected a list of"}),
    (StoreError, lambda url: named.name_shards(url, endpoint=None, allow_missing=True), {"set/x-{0..1}.tar": "2 were"}),
    (TypeError, lambda value: color.jitter_range("hue", value), {"a": "hue must be a number or a pair of numbers"}),
    (PipesError, lambda url: open_loader(url).__reduce_ex__(2), {"set": "cannot be copied, pickled or sent to an"}),
    (TypeError, lambda url: open_loader(url).as_dataloader().__getitems__(url), {"set": "order, and no samples 'set'"}),
    (TypeError, lambda name: dp.loader("set", dp.segmentation(), **{name: 4}), {
        "num_workers": "no argument 'num_workers'; a loader has threads of its own", "transform": "belongs into the gr",
        "batchsize": "did you mean 'batch_size'?", "directory": "pass cache=dali_pipes.Cache(directory=)"}),
    (TypeError, lambda name: dp.Cache(**{name: 1}), {"dir": "did you mean 'directory'?", "x": "it takes directory, "}),
    (TypeError, dp.Loader, {"set": "a Loader is made by the function dali_pipes.loader(shards, graph, batch_size="}),
    (TypeError, lambda crop: dp.segmentation(crop=json.loads(crop)), {
        '"16"': "crop must be an integer, got '16'", '[16, 16, "3"]': "crop must be one number, or rows and"}),
    (TypeError, lambda crop: dp.classification_train(crop=float(crop)), {"16": "crop must be an integer, got 16.0"}),
    (TypeError, lambda side: dp.classification_eval(resize=(side,)), {"9": "resize must be an integer, got ('9',)"}),
    (TypeError, lambda given: dp.Mixture({"a": "x"}, **json.loads(given)), {
        '{"weights": {"a": true}}': "of 'a' must be a number, got True", '{"etl": "e"}': "names to ETLs, got str"}),
    (TypeError, lambda rank: find_rank(rank=rank, world_size=2), {"0": "rank must be an integer, got '0'"}),
    (TypeError, lambda num: dp.Mixture({int(num): "x"}), {"1": "a data set's name must be a text, got 1"}),
    (ValueError, lambda name: dp.Mixture({"a": "x"}, etl={name: "e"}), {"b": "the sets 'a', got one for 'b'"}),
]
# fmt: on


@pytest.mark.parametrize(("error", "call", "cases"), CASES)
def test_what_cannot_be_is_refused(
    error: type[Exception], call: Any, cases: dict[str, str], small_shards: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("set").symlink_to(small_shards)
    write_shards(Path("plain"), [Sample("a", {"jpg": b"x"})], per_shard=1, index=False)
    Path("plain/cat").mkdir()
    Path("plain/cat/a").write_text("text")
    LocalStore(Path("plain")).write(recoded_name("r-"), b"{}")
    write_shards(Path("empty"), [Sample("a", {})], per_shard=1)
    for name, cell in {"a": "a.jpg", "long": 200_000 * "x"}.items():
        Path(f"{name}.csv").write_text(f"path\n{cell}\n")
    monkeypatch.setenv("PATH", "/none")
    for case, message in cases.items():
        with pytest.raises(error, match=re.escape(message)):
            call(case)


def test_bench_finds_a_bucket_of_the_environment_and_skips_loaders_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "https://minio:9000/")
    shards: Any = SimpleNamespace(store=SimpleNamespace(url="s3://b", endpoint=None, cluster=None, directory=None))
    with s3.client_environment(shards, AWS_ENDPOINT_URL="http://127.0.0.1"):
        assert s3.s3_place(shards) == ("http://127.0.0.1:80", "b")
    assert s3.s3_place(shards) == ("https://minio:9000", "b")
    assert registry.place_of(shards) == "s3"
    specs, skipped = registry.select_loaders(["dali-decode"], shards=PLAIN)
    assert "dali" in map(str, specs)
    assert "skipped: loader 'dali-s3' reads shards in a bucket of AIStore or in a bucket of S3, got '/a'" in skipped
    large = protocol.LoaderOptions(device="cpu", batch_size=1 << 60)
    assert workers.fitting_batch_size(large, num_shards=1) < 1 << 50
    monkeypatch.setenv("PATH", "/none")  # no git
    assert environment.describe_commit() == {"commit": None, "is_dirty": None}
