"""All commands print by these functions: no control codes, no secret, and an exit code for each error.

tests/test_imports.py checks that nothing else prints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from dali_pipes import progress
from dali_pipes.cli import cli, main
from dali_pipes.commands import output
from dali_pipes.errors import DataError, StoreError, keep_secret

SECRET = "t0ken-of-the-test-of-output"
EVIL = f"\x1b[2J\x9b31m\nerror: \u202egpj {SECRET}"
"""Clears the screen, sets a colour, begins a line like ours, reverses the writing direction, and holds a secret."""
SHOWN = r"\x1b[2J\x9b31m\nerror: \u202egpj ***"

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _secret() -> None:
    keep_secret(SECRET)


@pytest.mark.parametrize(
    ("print_it", "expected"),
    [
        (lambda: output.print_line(EVIL), (f"{SHOWN}\n", "")),
        (lambda: output.print_line(EVIL, fg="red", err=True), ("", f"{SHOWN}\n")),  # not a terminal, so no colour
        (lambda: output.print_note(EVIL), ("", f"{SHOWN}\n")),
        (lambda: output.print_result(EVIL, {"key": "a"}, as_json=False), (f"{SHOWN}\n", "")),
        (lambda: output.print_some(EVIL, ["a", EVIL]), ("", f"{SHOWN}: a\n{SHOWN}: {SHOWN}\n")),
        (lambda: output.print_reasons("bad", {EVIL: 7}), ("", f"       7  bad: {SHOWN}\n")),
        (lambda: output.print_some("bad", ["a"] * 22), ("", "bad: a\n" * 20 + "bad: 2 more, --json names all\n")),
    ],
)
def test_each_text_is_one_harmless_line(
    print_it: Callable[[], None], expected: tuple[str, str], capsys: Captured
) -> None:
    print_it()
    assert tuple(capsys.readouterr()) == expected


def test_log_shows_escapes_and_a_traceback_keeps_its_lines() -> None:
    try:
        raise ValueError(EVIL)
    except ValueError as exc:
        info = (type(exc), exc, exc.__traceback__)
    record = logging.LogRecord("log", logging.ERROR, __file__, 1, "failed: %s", (EVIL,), info)
    lines = progress._handler.format(record).split("\n")
    assert lines[:2] == [f"ERROR log: failed: {SHOWN}", "Traceback (most recent call last):"]
    assert all(line.isprintable() and SECRET not in line for line in lines)


@pytest.mark.parametrize("command", ["profile", "tune"])
def test_measuring_refuses_what_it_could_not_write_before_it_runs(
    tmp_path: Path, command: str, capsys: Captured
) -> None:
    """The command refuses a bad output path before it looks for the shards and measures for minutes."""
    assert main([command, f"{tmp_path}/shards", "-o", f"{tmp_path}/no/it.json"]) == 2
    assert f"directory '{tmp_path}/no'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("trace.txt", "expected a trace, .json, got"),
        ("nowhere/trace.json", "no directory .*nowhere'; make it"),
        ("folder.json", "folder.json' is a directory; name a file in it"),
    ],
)
def test_output_that_cannot_be_written_is_misuse(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "folder.json").mkdir()
    options = {"endings": (".json",), "expected": "a trace, .json", "option": "-o"}
    output.check_output(tmp_path / "trace.JSON", **options)
    with pytest.raises(click.BadParameter, match=text):
        output.check_output(tmp_path / name, **options)
    refused = pytest.raises(StoreError, match=r"cannot write '.*folder.json': Is a directory")
    with refused, output.writing(tmp_path / "folder.json"):
        (tmp_path / "folder.json").write_text("")


@pytest.mark.parametrize(
    ("end", "code", "shown"),
    [
        (DataError(EVIL), 1, f"error: {SHOWN}"),
        (StoreError("no answer"), 1, "error: no answer"),
        (FileNotFoundError(2, "No such file", EVIL), 1, "error: [Errno 2] No such file: "),
        (ValueError(EVIL), 2, f"error: {SHOWN}"),  # a bad argument
        (click.BadParameter("3 is too many"), 2, "Error: Invalid value: 3 is too many"),
        (click.ClickException("no package"), 1, "Error: no package"),
        (KeyError(SECRET), 1, "error: internal: KeyError: '***'; run it again with -v and report its output"),
        (KeyboardInterrupt(), 130, "error: interrupted"),
        (click.exceptions.Exit(3), 3, ""),
        (None, 0, ""),
    ],
)
def test_end_of_a_command_is_an_exit_code_and_one_line(
    end: BaseException | None, code: int, shown: str, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    """The exit code is 0 for done, 1 for failed, 2 for misused; errors go to stderr, because stdout is for results."""

    def command(**_: Any) -> None:
        if end is not None:
            raise end

    monkeypatch.setattr(cli, "main", command)
    assert main(["prep"]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(shown)
    assert said.err.count("\n") == (shown != "")
    assert SECRET not in said.err
    assert "Traceback" not in said.err
