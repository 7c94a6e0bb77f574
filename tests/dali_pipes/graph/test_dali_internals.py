"""What this project relies on of DALI that DALI does not document.

After an upgrade of DALI, a failure here says which function of `dali_pipes.graph.dali_internals` to mend.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.lazy import Lazy
from tests.shards import Sample, make_samples, write_shards

dali, backend, fn, types = (Lazy(f"nvidia.dali{name}") for name in ("", ".backend", ".fn", ".types"))
plugin = Lazy("nvidia.dali.plugin.pytorch")
internals = Lazy("dali_pipes.graph.dali_internals")

OPTIONS: dict[str, Any] = {"batch_size": 1, "num_threads": 1, "device_id": None, "exec_dynamic": True}


def test_iterators_have_what_is_used() -> None:
    """DALI 2.4 keeps these values in an iterator."""
    from nvidia.dali.plugin.base_iterator import LastBatchPolicy

    with dali.Pipeline(**OPTIONS) as pipeline:
        pipeline.set_outputs(fn.external_source(source=lambda: [np.int64(1)], batch=True, dtype=types.INT64, ndim=0))
    pipelines = [pipeline]
    iterator = plugin.DALIGenericIterator(pipelines, ["a"], auto_reset=True, prepare_first_batch=False)
    assert iterator._pipes is pipelines, "the loader changes this list"
    for attribute, value, function in (
        ("_size", -1, "set_epoch_size"),
        ("_last_batch_policy", LastBatchPolicy.FILL, "set_epoch_size"),
        ("_auto_reset", "yes", "set_auto_reset"),
    ):
        found = getattr(iterator, attribute, "nothing")
        assert found == value, f"DALI has another DALIGenericIterator.{attribute}: mend {function}()"
    assert vars(iterator).keys() == {*internals.ITERATOR_ATTRIBUTES}, "DALI has others: mend ITERATOR_ATTRIBUTES"
    internals.set_auto_reset(iterator, False)
    assert iterator._auto_reset == "no"
    internals.set_epoch_size(iterator, 7, LastBatchPolicy.DROP)
    assert (iterator._size, iterator._last_batch_policy) == (7, LastBatchPolicy.DROP)


def test_every_decoder_is_found_by_its_name() -> None:
    """All operators in DALI's decoder modules, and all that take a share of the engines, have ``decoder`` in theirs."""
    for name in {*backend.RegisteredCPUOps(), *backend.RegisteredGPUOps(), *backend.RegisteredMixedOps()}:
        schema = backend.GetSchema(name)
        is_decoder = "decoders" in schema.ModulePath() or schema.HasArgument("hw_decoder_load")
        assert is_decoder <= ("decoder" in schema.Name().lower()), f"'{schema.Name()}' decodes: mend _is_decoder()"


EPOCHS = """
import resource, sys
import dali_pipes as dp
from nvidia.dali import fn

def graph(components, random):
    return {"shape": fn.peek_image_shape(components["image.jpg"], adjust_orientation=False)}

decode = dp.Decode(reader="webdataset")  # the other reader has memory of its own
with dp.loader(sys.argv[1], graph, batch_size=16, device="cpu", decode=decode) as loader:
    for epoch in range(13):
        if epoch == 5:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in loader:
            pass
        loader.reset()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / (8 * loader.num_samples))
"""


@pytest.mark.nightly
@pytest.mark.fresh_interpreter
def test_memory_of_batches_is_reused(tmp_path: Path) -> None:
    """32 batches of 100 kB photos, in a process of their own, cause fewer than two thirds of malloc's page faults. An
    environment variable selects ``malloc``.
    """
    (photo,) = make_samples([(700, 500)])
    samples = [Sample(f"{number}", photo.components) for number in range(64)]
    shards = write_shards(tmp_path, samples, per_shard=32)
    base = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    faults = [
        float(subprocess.check_output([sys.executable, "-c", EPOCHS, shards], text=True, env=base | chosen))
        for chosen in ({}, {"DALI_MALLOC_POOL_THRESHOLD": "32M"})
    ]
    assert faults[0] < faults[1] * 2 / 3, f"page faults a sample: {faults}"


def test_an_output_that_is_no_node_goes_to_the_gpu_as_a_constant() -> None:
    """As DALI takes it on the CPU."""
    with dali.Pipeline(batch_size=1, num_threads=1, device_id=0):
        node = fn.random.uniform()
        assert [internals.on_gpu(output).device for output in (node, 2, types.Constant(3))] == ["gpu"] * 3


def test_decoded_inputs_and_shared_crops_are_found_behind_other_operators() -> None:
    """What an image decoder gets, and what one crop cuts; audio, crops and other inputs of a decoder are no photos."""
    pipeline = dali.Pipeline(**OPTIONS)

    def source(dtype: Any) -> Any:
        return fn.external_source(source=lambda: None, batch=True, dtype=dtype, ndim=1)

    with pipeline:
        photos = {name: source(types.UINT8) for name in "abcdefgh"}
        arrays = {name: source(types.INT32) for name in "xyz"}
        start = fn.cast(fn.reinterpret(photos["h"], dtype=types.INT32), dtype=types.INT32)
        pipeline.set_outputs(
            fn.crop_mirror_normalize(fn.decoders.image_slice(photos["a"], arrays["x"], arrays["y"]), crop=(3, 3)),
            fn.decoders.image_slice(photos["b"], start=arrays["x"], shape=arrays["y"]),
            fn.slice(fn.decoders.image(photos["c"]), arrays["x"], arrays["y"], axes=(0, 1)),
            fn.peek_image_shape(photos["d"], adjust_orientation=False),
            fn.decoders.audio(photos["e"])[0],
            fn.decoders.image(fn.cat(photos["f"], photos["f"]), adjust_orientation=False),
            photos["g"],
            fn.decoders.image_slice(photos["f"], start, arrays["z"], adjust_orientation=False),
            fn.decoders.image_slice(photos["d"], arrays["z"], arrays["y"]),
        )
    expected = {"a": {True}, "b": {True}, "c": {True}, "d": {True, False}, "f": {False}}
    assert internals.decoded_inputs(pipeline, photos) == expected
    assert internals.shared_crops(pipeline, photos, arrays) == [set("abc")]
