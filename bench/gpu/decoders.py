"""Find out which decoder decoded each photo, from nvImageCodec's log.

nvImageCodec reads ``DALI_NVIMGCODEC_LOG_LEVEL`` whenever a decoder is made, and writes to stderr. From level 3 on it
logs, among others, these lines of a batch of four (colours removed)::

    [INFO] [nvimgcodec] create nvjpeg_hw_decoder load_hint 0.65 load_hint_policy 1
    [INFO] [nvimgcodec] ImageGenericDecoder::decode num_samples=4
    [INFO] [nvimgcodec] nvjpeg_hw_decoder failed #2. Trying next: nvjpeg_cuda_decoder
    [INFO] [nvimgcodec] 3: nvjpeg_cuda_decoder process #2
    [INFO] [nvimgcodec] 0: libjpeg_turbo_decoder process #0

Decoders that take a photo at a time have a line for each photo. The JPEG engines take a batch, and a release build logs
no line for it: they decoded the photos that no other decoder has a line for, here #1 and #3. Seen on a CPU: the lines
``create``, ``decode``, ``process`` and ``Framework is registering decoder``. The others were read in nvImageCodec's
sources, versions 0.8 (``src/image_generic_codec.h``) and, as texts in the library, 0.9.
"""

import contextlib
import gc
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator

LOG_LEVEL = "DALI_NVIMGCODEC_LOG_LEVEL"
ENGINES = "nvjpeg_hw_decoder"
HYBRID = "nvjpeg_cuda_decoder"

# Threads write at the same time: a message is whole, but another one may follow it in the same line. A number is glued
# to the thread number of such a message: "process #1" and "13: ..." give "process #113: ...".
_GLUED = r"(?P<{0}>(?=: ))?"
_EVENT = re.compile(
    r"registering decoder \(id:(?P<registered>\w+) codec:(?P<codec>\w+)\)"
    r"|create (?P<created>[a-z0-9_]+) load_hint"
    r"|(?P<call>::)?decode num_samples=(?P<batch>\d+)"
    + _GLUED.format("glued_batch")
    + r"|: (?P<decoder>[a-z0-9_]+_decoder) process #(?P<sample>\d+)"
    + _GLUED.format("glued_sample")
    + r"|Sample #\d+ (?P<refused>can't be processed)"
)


@contextlib.contextmanager
def logged() -> Iterator[list[str]]:
    """Collect what the decoders that are made and closed meanwhile log; the list gets the text at the end.

    Everything that this process writes to stderr meanwhile is collected, too, instead of shown.
    """
    found: list[str] = []
    before = os.environ.get(LOG_LEVEL)
    sys.stderr.flush()
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        os.environ[LOG_LEVEL] = "4"
        try:
            yield found
        finally:
            gc.collect()  # a decoder in a cycle would go on logging
            sys.stderr.flush()
            os.dup2(stderr, 2)
            os.close(stderr)
            os.environ.pop(LOG_LEVEL)
            if before is not None:
                os.environ[LOG_LEVEL] = before
            log.seek(0)
            found.append(log.read().decode(errors="replace"))


def who_decoded(log: str) -> dict[str, int]:
    """Count the photos and masks in a log, by decoder.

    Returns:
        ``num_photos``; ``engines``, ``hybrid``, ``cpu``: photos of each; ``masks``: samples of the PNG decoder;
        ``failed``: samples that no decoder took; ``unknown``: samples without a line, although there were no engines.

    >>> who_decoded("::decode num_samples=2\\n1: nvjpeg_cuda_decoder process #0\\n")["unknown"]
    1
    """
    codecs: dict[str, str] = {}
    created: set[str] = set()
    batches: list[int] = []
    failed = 0
    # A second line of the same sample means that the decoder before it failed. Photos and masks have calls of their
    # own, which may overlap, so a sample is told by its codec, too.
    decoded: dict[tuple[str, int, int | str], str] = {}
    for event in _EVENT.finditer(log):
        if registered := event["registered"]:
            codecs[registered] = event["codec"]
        elif event["created"]:
            created.add(event["created"])
        elif event["batch"]:
            if event["call"]:
                batches.append(0)
            # The same number comes again, without the colons.
            if event["glued_batch"] is None:
                batches[-1] = int(event["batch"])
        elif decoder := event["decoder"]:
            sample = int(event["sample"]) if event["glued_sample"] is None else f"at {event.start()}"
            decoded[codecs.get(decoder, decoder), len(batches), sample] = decoder
        elif event["refused"]:
            failed += 1
    by_decoder = Counter(decoded.values())
    num_samples = sum(batches)
    rest = num_samples - len(decoded) - failed
    masks = sum(count for decoder, count in by_decoder.items() if codecs.get(decoder) == "png")
    has_engines = ENGINES in created
    return {
        "num_photos": num_samples - masks,
        "engines": rest if has_engines else 0,
        "hybrid": by_decoder[HYBRID],
        "cpu": len(decoded) - by_decoder[HYBRID] - masks,
        "masks": masks,
        "failed": failed,
        "unknown": 0 if has_engines else rest,
    }
