"""What holds for every command: --json means one thing, stdout is for results, bars and colours are for people.

The commands are found by walking the program: one that is new and not told of here fails.
"""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from dali_pipes.cli import cli, main
from dali_pipes.store.cluster.endpoint import check_endpoint
from dali_pipes.store.local import LocalStore
from dali_pipes.store.urls import resolve_shards
from prep.index import index_shards
from prep.sources.demo_photos import demo_photos
from tests.prep.sources.test_coco import write_split
from tests.prep.sources.test_hf import write_hf
from tests.prep.sources.test_voc import write_voc
from tests.prep.sources.test_yolo import write_yolo
from tests.shards import encode_photo, pack, write_pets

WITHOUT_JSON = {"completion": "prints a script, for a shell to read"}
ELSEWHERE = {
    "demo": "tests/bench",
    "profile": "its own tests",
    "tune": "its own tests",
    "prep embedded": "runs until it is ended: test_embedded_serves_until_ctrl_c",
    "prep etl get": "tests/prep/etl/test_etl.py, with a node that runs transforms",
    "prep etl run": "tests/prep/etl/test_etl.py",
    "prep etl start": "tests/prep/etl/test_etl.py",
    "prep etl stop": "tests/prep/etl/test_etl.py",
}
"""Commands that are not run here, and where they are."""

# Placeholders are folders of `places`.
RUNS = {
    "cache clear": "--cache {cache}",
    "cache ls": "--cache {cache}",
    "cache warm": "{shards} --cache {cache}",
    "doctor": "--cache {cache}",
    "prep add": "{shards} {living} --known skip",
    "prep compact": "{living}",
    "prep diff": "{shards} {living}",
    "prep index": "{shards}",
    "prep info": "{shards}",
    "prep log": "{living}",
    "prep make": "{pets} {out}",
    "prep pack coco": "{coco} {out}",
    "prep pack demo": "{out} --count 8",
    "prep pack hf": "{hf} {out}",
    "prep pack imagefolder": "{photos} {out}",
    "prep pack pets": "{pets} {out}",
    "prep pack photos": "{photos} {out}",
    "prep pack table": "{photos}/list.csv {out}",
    "prep pack tars": "{shards} {out}",
    "prep pack voc": "{voc} {out}",
    "prep pack yolo": "{yolo} {out}",
    "prep recode": "{shards} {out} --short-side 40 --masks nearest",
    "prep relabel": "{living} --rename coffee=tea",
    "prep remove": "{living} --shard samples-000001.tar",
    "prep shuffle": "{mixed}/samples-",
    "prep transform": "{shards} {out} --overwrite --jobs 1 --function tests.prep.commands.test_conventions:as_it_is",
    "prep verify": "{shards}",
    "prep view": "{shards} {out}.png",
}

# What commands say if their input is missing: one command for each function that raises such an error. Nothing answers
# at the port {closed}. tests/dali_pipes/commands/test_output.py checks the one line and the exit code of every error.
FAILS = {
    "prep embedded": ("--dir {photos}/list.csv/x", "list.csv"),
    "prep etl get": ("ais://b/x-0.tar {out} --function pets --endpoint {closed}", "no answer from AIStore at"),
    "cache warm": ("{out}/none --cache {cache}", "no such directory: '{out}'"),
    "prep add": ("{photos}/none {shards}", "no such file or directory: '{photos}/none'"),
    "prep compact": ("{photos}", "'{photos}' holds photos, and no shards"),
    "prep make": ("{out}/none {out}", "no such file or directory: '{out}/none'"),
    "prep pack demo": ("{photos}/list.csv/x --count 8", "{photos}/list.csv/x"),
    "prep pack hf": ("{photos}/none {out}", "'{photos}/none'"),
    "prep pack pets": ("{photos} {out}", "no such directory: '{photos}/images'"),
    "prep pack table": ("{photos}/none.csv {out}", "cannot read '{photos}/none.csv'"),
}
# Two of the commands that need the offsets of components in plain tars.
READ_PLAIN = {"cache warm": "{packed} --cache {cache}", "prep index": "{packed}"}


def as_it_is(sample: dict[str, bytes]) -> dict[str, bytes]:
    return sample


def _walk(command: click.Command, context: click.Context, path: str = "") -> Iterator[tuple[str, click.Command]]:
    if not isinstance(command, click.Group):
        yield path, command
        return
    for name in command.list_commands(context):
        # Its --json FILE writes a record, which is what a benchmark is run for.
        if name != "bench":
            found = command.get_command(context, name)
            assert found is not None
            yield from _walk(found, context, f"{path} {name}".strip())


COMMANDS = dict(_walk(cli, click.Context(cli)))


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Something of every kind that a command reads."""
    root = tmp_path_factory.mktemp("conventions")
    names = ("shards", "mixed", "packed", "photos", "pets")
    found = {name: root / name for name in names}
    pack(demo_photos(count=8, seed=0), store=LocalStore(found["shards"]), max_count=4)
    shutil.copytree(found["shards"], found["mixed"])
    index_shards(resolve_shards(found["shards"], endpoint=None))
    found["living"] = root / "living"
    pack(demo_photos(count=12, seed=1), store=LocalStore(found["living"]), max_count=4)
    index_shards(resolve_shards(found["living"], endpoint=None))
    found["packed"].mkdir()
    (found["packed"] / "x-000000.tgz").touch()
    write_pets(found["pets"], {"Abyssinian_1": 1, "beagle_1": 5})
    for number in range(2):
        path = found["photos"] / ("cat", "dog")[number] / f"{number}.jpg"
        path.parent.mkdir(parents=True)
        path.write_bytes(encode_photo(seed=number))
    (found["photos"] / "list.csv").write_text("path,label\ncat/0.jpg,1\ndog/1.jpg,2\n")
    write_split(root / "coco", "val", range(2))
    write_yolo(root / "yolo")
    found["voc"] = write_voc(root / "voc")
    found["coco"], found["yolo"], found["hf"] = root / "coco", root / "yolo", root / "hf"
    write_hf(found["hf"] / "a.parquet", [{"image": {"bytes": encode_photo(), "path": None}, "label": 1}])
    return {name: str(path) for name, path in found.items()}


@pytest.fixture
def fill(places: dict[str, str], tmp_path: Path, closed_port: int) -> "Filler":
    (tmp_path / "cache").mkdir()
    return Filler(
        {
            **places,
            "out": str(tmp_path / "out"),
            "cache": str(tmp_path / "cache"),
            "closed": f"http://127.0.0.1:{closed_port}",
        }
    )


class Filler:
    """Places in the place of their names."""

    def __init__(self, places: dict[str, str]) -> None:
        self._places = places

    def text(self, text: str) -> str:
        return text.format(**self._places)

    def __call__(self, path: str, text: str) -> list[str]:
        return [*path.split(), *(self.text(word) for word in text.split())]


def test_every_command_is_told_of() -> None:
    """A new command needs a line above that says how to run it."""
    assert sorted([*RUNS, *ELSEWHERE, *WITHOUT_JSON]) == sorted(COMMANDS)


@pytest.mark.parametrize(
    "path", [path for path in COMMANDS if re.match("prep (pack|make|shuffle|index|embedded)", path)]
)
def test_help_names_every_default(path: str) -> None:
    for option in COMMANDS[path].params:
        if isinstance(option, click.Option) and not (option.is_flag or option.required or option.hidden):
            described = option.show_default or "[default:" in (option.help or "")
            assert described or option.name == "endpoint", option.name


@pytest.mark.parametrize("path", sorted(RUNS))
def test_json_prints_one_document_and_nothing_else(path: str, fill: Filler, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = fill(path, RUNS[path])
    code = main([*arguments, "--json"])
    said = capfd.readouterr()
    # doctor: 1 where this machine does not fit, which is a result, too.
    assert code == 0 or path == "doctor", said.err
    assert isinstance(json.loads(said.out), dict | list)
    assert said.out.count("\n") == 1
    assert "\r" not in said.err


@pytest.mark.parametrize("path", sorted(FAILS))
def test_failure_is_one_line_on_stderr_and_1(path: str, fill: Filler, capfd: pytest.CaptureFixture[str]) -> None:
    text, expected = FAILS[path]
    assert main([*fill(path, text), "--json"]) == 1
    said = capfd.readouterr()
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert said.err.startswith("error: ")
    assert fill.text(expected) in said.err


@pytest.mark.parametrize("path", sorted(READ_PLAIN))
def test_compressed_shards_are_told_at_once(path: str, fill: Filler, capfd: pytest.CaptureFixture[str]) -> None:
    """By whatever reads plain tars: the name, why it cannot be read, and the command that can."""
    assert main(fill(path, READ_PLAIN[path])) == 1
    said = capfd.readouterr().err
    assert fill.text("error: shard '{packed}/x-000000.tgz' is compressed: DALI reads each sample at its offset") in said
    assert fill.text("dali-pipes prep shuffle '{packed}' --extension .tar") in said


# A terminal


def _on_a_terminal(*arguments: str) -> str:
    """Run a command on a terminal, and return the text that it writes."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 100))
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    with subprocess.Popen(
        [sys.executable, "-m", "dali_pipes", *arguments],
        stdout=theirs,
        stderr=theirs,
        stdin=subprocess.DEVNULL,
        env=variables,
    ) as process:
        os.close(theirs)
        parts = []
        try:
            while part := os.read(ours, 1 << 16):
                parts.append(part)
        except OSError:  # its last writer is gone
            pass
    os.close(ours)
    assert process.returncode == 0
    return b"".join(parts).decode()


def test_colours_and_bars_are_for_a_terminal(fill: Filler, capfd: pytest.CaptureFixture[str]) -> None:
    """Without a terminal there are none. See also tests/dali_pipes/commands/test_output.py."""
    arguments = fill("prep verify", RUNS["prep verify"])
    written = _on_a_terminal(*arguments)
    assert "\x1b[32m" in written
    assert "nothing is wrong with" in written
    assert re.search(r"verify: +100%.*\[[0-9:]+<[0-9:]+, .*/s\]", written), written
    assert main(arguments) == 0
    said = capfd.readouterr()
    assert "\x1b" not in said.out
    assert said.err == ""


def test_embedded_serves_until_ctrl_c(tmp_path: Path) -> None:
    """Its endpoint is one JSON document; exit status 0, because this is the way to end it."""
    command = [sys.executable, "-m", "dali_pipes", "prep", "embedded", "--dir", str(tmp_path / "ais"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = json.loads(process.stdout.readline())
        check_endpoint(found["endpoint"])
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=120)[1] == ""
    assert process.returncode == 0
    assert found["dir"] == str(tmp_path / "ais")


@pytest.mark.fresh_interpreter
def test_commands_need_neither_dali_nor_torch(small_shards: Path, tmp_path: Path) -> None:
    """`prep` works on a machine that packs, and trains nothing; help loads nothing at all."""
    program = (
        "import sys\n"
        "for name in ('torch', 'nvidia.dali', 'dali_pipes.bad_samples'): sys.modules[name] = None\n"
        "from dali_pipes.cli import main\n"
        "for name in ('verify', 'info', 'view'): assert main(['prep', name, '--help']) == 0\n"
        "assert not {'numpy', 'PIL', 'aistore'} & set(sys.modules)\n"
        "shards, out = sys.argv[1:]\n"
        "for words in (['pack', 'tars', shards, out], ['index', out], ['verify', out], ['info', out]):\n"
        "    assert main(['prep', *words]) == 0\n"
        "assert main(['prep', 'view', out, out + '.png']) == 0\n"
    )
    command = [sys.executable, "-c", program, str(small_shards), str(tmp_path / "out")]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
