"""Options of ``prep verify`` and ``prep view`` that cannot be."""

from pathlib import Path

import pytest

from tests.prep.commands.calls import call_prep


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("view out.txt", "expected a page's name, .html, or a picture's name, .png, .jpg or .webp, got 'out.txt'"),
        ("view nowhere/out.png", "no directory 'nowhere'; make it"),
        ("view a.png --quarantine bad.tsv", "--quarantine is for a page: name one, -o page.html"),
        ("view out.png --keys k1 --where-label 1", "--keys and --where-label exclude each other"),
        ("verify --mask-values 1,x", "expected numbers from 0 to 255 such as '1,2,3' or '0-20,255', got '1,x'"),
        ("verify --mask-values 0-999999999999", "expected numbers from 0 to 255"),  # must not build so long a list
        ("verify --no-masks --mask x.png", "--no-masks and --mask exclude each other"),
    ],
)
def test_misuse_says_what_was_expected(small_shards: Path, arguments: str, text: str) -> None:
    command, *options = arguments.split()
    result = call_prep(command, small_shards, *options)
    assert result.exit_code == 2
    assert text in result.output
