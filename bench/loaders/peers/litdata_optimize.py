"""Convert shards to LitData's chunks: run ``litdata.optimize`` in a process of its own.

`optimize` sets how every later process of its own process starts, keeps folders below the temporary directory, and
starts its workers with everything that the caller has imported, unless they are forked. A process that has loaded
neither DALI nor CUDA can fork them, and may change its settings.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.loaders.encoded import EncodedSample, checked_fields, encoded_samples, open_stream

CHUNK_BYTES = "64MB"  # the README's, "What chunk_bytes should I use?"


def main() -> int:
    """Read the job that `bench.loaders.peers.litdata.prepare` writes to standard input, and write the chunks."""
    job = json.load(sys.stdin)
    scratch = Path(job["scratch"])
    os.environ["DATA_OPTIMIZER_CACHE_FOLDER"] = str(scratch / "chunks")
    os.environ["DATA_OPTIMIZER_DATA_CACHE_FOLDER"] = str(scratch / "data")
    import litdata

    urls, endpoint = job["urls"], job["endpoint"]
    fields = list(next(_samples(urls[0], endpoint=endpoint)))

    def read(row: int) -> Iterator[EncodedSample]:
        for sample in _samples(urls[row], endpoint=endpoint):
            yield checked_fields(sample, fields, shard=urls[row])

    litdata.optimize(
        fn=read,
        # Rows and not paths: paths would be copied before they are read.
        inputs=list(range(len(urls))),
        output_dir=job["directory"],
        chunk_bytes=CHUNK_BYTES,
        num_workers=min(job["num_workers"], len(urls)),
        start_method="fork",
        verbose=False,
    )
    return 0


def _samples(url: str, *, endpoint: str | None) -> Iterator[EncodedSample]:
    with open_stream(url, endpoint=endpoint) as stream:
        yield from encoded_samples(stream, shard=url)


if __name__ == "__main__":
    sys.exit(main())
