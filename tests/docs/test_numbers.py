"""Numbers that pages promise are those of the code. Tests elsewhere show that the code keeps to its numbers."""

import inspect

import pytest

import dali_pipes as dp
from dali_pipes.commands.tune import tune
from dali_pipes.data_set import indexing
from dali_pipes.fetch import demand, stager
from dali_pipes.formats import photo_header, tar_reader
from dali_pipes.metrics import counts, prometheus
from dali_pipes.store import listings, patience
from dali_pipes.store.cluster import client as cluster_client
from dali_pipes.store.http import answers, client, rules, wire
from prep.etl import transforms
from prep.inspect import view_page
from prep.pack import target
from prep.shuffle import contents
from prep.sources import tars
from prep.versions import fit
from prep.workers import on_ray
from tests.docs.pages import REPOSITORY

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


@pytest.mark.parametrize(
    ("page", "text", "found", "expected"),
    [
        ("bad-data", "64 KiB, and 8 bytes for each", wire.MAX_LINES_BYTES, 64 * KIB),
        ("bad-data", "1,024 bytes a second", wire.MIN_BYTES_PER_S, 1024),
        ("bad-data", "(60 s for a shard)", client.SILENCE_S, 60),
        ("bad-data", "4 GiB for an object", answers.MAX_OBJECT_BYTES, 4 * GIB),
        ("bad-data", "64 MiB for anything else", answers.MAX_ANSWER_BYTES, 64 * MIB),
        ("bad-data", "1 MiB for an error", cluster_client.MAX_REFUSAL_BYTES, MIB),
        ("bad-data", "10,000 pages", listings.MAX_PAGES, 10_000),
        ("bad-data", "| redirects | 4,", rules.MAX_REDIRECTS, 4),
        ("bad-data", "| 256 MiB; 1 MiB if", photo_header.MAX_PHOTO_BYTES, 256 * MIB),
        ("bad-data", "| 1,000 bytes, a number", indexing.MAX_LABEL_BYTES, 1000),
        ("bad-data", "content`) | 64 KiB |", contents.MAX_VALUE_BYTES, 64 * KIB),
        ("bad-data", "(`transform`) | 1 GiB |", transforms.MAX_SAMPLE_BYTES, GIB),
        ("bad-data", "| 2 GiB of memory", tars.MAX_LIST_BYTES, 2 * GIB),
        ("bad-data", "PAX records | 1 MiB |", tar_reader.MAX_EXTENDED_BYTES, MIB),
        ("bad-data", "accepts, 100 by default", dp.BadSamples().max_bad, 100),
        ("stores", "`Cache(patience_s=600)`", dp.Cache().patience_s, 600),
        ("stores", "at most five seconds", patience.Patience().longest_pause_s, 5),
        ("stores", "After three seconds a line", patience._QUIET_S, 3),
        ("stores", "again once a minute", patience._TOLD_EACH_S, 60),
        ("scale", "or up to eight that", stager.NUM_TOGETHER, 8),
        ("scale", "that take 32 MiB together", stager.TOGETHER_BYTES, 32 * MIB),
        ("living-data-sets", "up to\n  256 MiB of them", fit.MAX_READ_BYTES, 256 * MIB),
        ("watch", "at most 48 KiB for each", view_page.SAMPLE_BYTES, 48 * KIB),
        ("watch", "and 4 MiB for everything", view_page.REST_BYTES, 4 * MIB),
        ("scale", "at most five times", on_ray.MAX_RETRIES, 5),
        ("scale", "sets below 64 MiB", target.MIN_SHARED_BYTES, 64 * MIB),
        ("watch", "in under two minutes", next(one.default for one in tune.params if one.name == "seconds"), 90),
        ("watch", "within two seconds", prometheus.NODE_S, 2),
        ("watch", "every 15 s", inspect.signature(dp.metrics.write_textfile).parameters["every_s"].default, 15),
        ("watch", "each wait of a second", counts._SPAN_S, 1),
        ("watch", "waits ten seconds", counts.LONG_WAIT_S, 10),
        ("watch", "at most once a minute", demand.TOLD_EACH_S, 60),
    ],
)
def test_a_number_of_a_page_is_the_code_s(page: str, text: str, found: object, expected: object) -> None:
    assert text in (REPOSITORY / "docs" / "how-to" / f"{page}.md").read_text()
    assert found == expected
