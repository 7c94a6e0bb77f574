"""The pages about deployment: commands that there are, links that lead somewhere, figures that the records have."""

import re
import shlex
import statistics
from pathlib import Path
from typing import Any

import click
import pytest

from bench.reports.record import read_record, read_run
from bench.reports.summary import values_of
from dali_pipes.cli import cli
from tests.deploy.dockerfile import ROOT

PAGES = sorted({*(ROOT / "deploy").glob("*.md"), *(ROOT / "deploy").glob("[!e]*/*.md"), ROOT / "docs" / "dgx.md"})
RESULTS = ROOT / "bench" / "results"


def shown_commands(text: str) -> list[list[str]]:
    """Every ``dali-pipes ...`` in a code block or between backticks."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = re.findall(r"^\s*(dali-pipes [^\n#]*)", joined, re.MULTILINE)
    lines += re.findall(r"`(dali-pipes [^`]*)`", re.sub(r"\s*\n\s*", " ", text))
    return [shlex.split(line.partition(" && ")[0]) for line in lines]


def test_pages_are_those_of_every_way_to_deploy() -> None:
    assert [str(page.relative_to(ROOT)) for page in PAGES] == [
        "deploy/README.md",
        "deploy/compose.md",
        "deploy/docker.md",
        "deploy/kubernetes/README.md",
        "deploy/slurm/README.md",
        "docs/dgx.md",
    ]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_pages_exist_with_their_options(page: Path) -> None:
    for words in shown_commands(page.read_text()):
        command: click.Command = cli
        rest = words[1:]
        while isinstance(command, click.Group) and rest:
            found = command.get_command(click.Context(command), rest.pop(0))
            assert found is not None, words
            command = found
        known = {option for parameter in command.params for option in parameter.opts}
        named = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert named <= known, words


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_pages_name_are_there(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("https://") or (page.parent / target).exists(), target
    for name in re.findall(r"(?<![\w/])(?:deploy|docs|examples|tests)/[\w./-]*\w", text):
        assert (ROOT / name).exists(), name


def record(name: str) -> dict[str, Any]:
    """A run's record, by the scenario's name."""
    (path,) = RESULTS.glob(f"{name}_amd-epyc-2-cores_2026-11-21.json")
    return read_record(path)


def figures(row: dict[str, Any]) -> dict[str, float]:
    """The medians of a row of a record."""
    names = [name for name, value in row["repeats"][0]["figures"].items() if value is not None]
    return {name: statistics.median(turn["figures"][name] for turn in row["repeats"]) for name in names}


def test_figures_are_those_of_the_records() -> None:
    """Measured ones as the records have them, and the example's as the formulas make of these."""
    text = (ROOT / "docs" / "dgx.md").read_text()
    rows = {
        cells[0].strip(): [cell.strip() for cell in cells[1:]]
        for cells in re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|", text, re.M)
    }

    plain, huge = (figures(record(name)["records"][0]) for name in ("fetch", "fetch-huge-pages"))
    for row, each in (
        ("fetch, checked, into `/dev/shm`, 8 connections", plain),
        ("the same into a tmpfs with huge pages", huge),
    ):
        assert rows[row][0] == f"{each['mib_per_s']:,.0f} MiB/s, {each['cpu_s_per_gib']:.2f} CPU-s/GiB"
    (path,) = RESULTS.glob("peers_amd-epyc-2-cores_2026-11-21.json")
    run = read_run(path)
    dali = next(each for each in run["records"] if each["loader"] == "dali")
    sample_bytes = run["data"][dali["data"]]["shard_bytes"] / run["data"][dali["data"]]["num_samples"]
    cpu_ms = statistics.median(values_of(dali, "cpu_ms_per_sample"))
    memory_gib = max(values_of(dali, "peak_memory_mib")) / 1024
    assert rows["a photo and its mask, decoded and cropped to 350 on the CPU"][0] == f"{cpu_ms:.2f} CPU-ms"
    assert rows["bytes of such a sample in its shard"][0] == f"{sample_bytes / 1000:.0f} kB"
    assert rows["memory of a process at batch 64, CPU"][0] == f"{memory_gib:.1f} GiB at most"
    windows = {tuple(each["setting"].values()): figures(each) for each in record("windows")["records"]}
    all_of_it, fifth = windows[1.0, 0.0], windows[0.2, 0.0]
    expected = f"{fifth['samples_per_s']:,.0f} against {all_of_it['samples_per_s']:,.0f} samples/s, waiting 0.00 %"
    assert rows["a cache of a fifth of the data set against one for all of it"][0] == expected
    assert fifth["data_wait"] == all_of_it["data_wait"] == 0
    million = next(each for each in record("scale")["records"] if each["setting"]["num_shards"] == 1_000_000)
    peak_mib = max(turn["peak_rss_mib"] for turn in million["repeats"])
    first_window_s = statistics.median(turn["stages"]["first_window"] for turn in million["repeats"])
    expected = f"{figures(million)['open_s'] + first_window_s:.1f} s, {peak_mib:.0f} MiB"
    assert rows["start with a million shards: manifest, plan, first window"][0] == expected

    rate = 2_500 * 8  # samples/s a node
    bytes_per_s = rate * sample_bytes
    num_nodes, num_samples = 4, 100_000_000
    assert rows["samples a node"][1] == f"{rate:,}/s"
    assert (
        rows["bytes a node, while shards are fetched"][1]
        == f"{bytes_per_s / 1e9:.1f} GB/s = {bytes_per_s * 8 / 1e9:.0f} Gb/s"
    )
    assert rows["cores to fetch and check them"][1] == f"{bytes_per_s / 2**30 * plain['cpu_s_per_gib']:.1f}"
    assert rows["cores to decode, if the CPU does it all"][1] == f"{rate * cpu_ms / 1000:.0f}"
    assert rows["most r that 14 cores can decode"][1] == f"{round(14_000 / cpu_ms, -2):,.0f}/s"
    assert rows["data set"][1] == f"{num_samples * sample_bytes / 1e12:.1f} TB"
    assert (
        rows["what a node stages with `Shuffle(slices=k)`"][1]
        == f"{num_samples * sample_bytes / num_nodes / 1e12:.1f} TB"
    )
    first_epoch_s = num_samples * sample_bytes / num_nodes / (400e9 / 8)
    assert rows["first epoch, if the network is the bound"][1] == f"{first_epoch_s:.0f} s at 400 Gb/s"
    assert rows["memory of the ranks"][1] == f"{8 * memory_gib:.0f} GiB"
    assert f"{num_nodes * bytes_per_s / 1e9:.1f} GB/s from the targets together" in text
