"""What this project relies on of DALI that DALI does not document.

After an upgrade of DALI, a failure here says which function of `dali_pipes.graph.dali_internals` to mend.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import nvidia.dali
import pytest
from nvidia.dali import backend, fn, ops, types
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.plugin.base_iterator import LastBatchPolicy
from nvidia.dali.plugin.pytorch import DALIGenericIterator

from dali_pipes.graph.dali_internals import (
    ITERATOR_ATTRIBUTES,
    QuickPipeline,
    add_decoder_arguments,
    argument_lines,
    decoded_inputs,
    decoders_behind,
    inputs_in_use,
    on_gpu,
    operator_name,
    operators_of,
    random_operators,
    refuse_any_data,
    schedule_batch,
    set_auto_reset,
    set_epoch_size,
    shared_crops,
)
from tests.shards import make_samples, mask_bytes, write_shards

VERSION = nvidia.dali.__version__
PNG = np.frombuffer(mask_bytes(0, 8, 8), np.uint8)


def a_pipeline(**options: Any) -> Pipeline:
    return Pipeline(**{"batch_size": 1, "num_threads": 1, "device_id": None, "exec_dynamic": True} | options)


def numbers(pipeline: Pipeline, source: Any) -> Any:
    """The node of an input that calls ``source``, made the output of ``pipeline``."""
    with pipeline:
        node = fn.external_source(source=source, batch=True, dtype=types.INT64, ndim=0)
        pipeline.set_outputs(node)
    return node


def all_operators() -> Iterator[Any]:
    """The schemas of all operators of this DALI."""
    names = {*backend.RegisteredCPUOps(), *backend.RegisteredGPUOps(), *backend.RegisteredMixedOps()}
    yield from (backend.GetSchema(name) for name in sorted(names))


@pytest.mark.parametrize(
    ("attribute", "value", "function"),
    [
        ("_size", -1, "set_epoch_size"),
        ("_last_batch_policy", LastBatchPolicy.FILL, "set_epoch_size"),
        ("_auto_reset", "yes", "set_auto_reset"),
    ],
)
def test_iterators_have_what_is_used(attribute: str, value: object, function: str) -> None:
    """DALI 2.4 keeps these values in an iterator."""
    pipeline = a_pipeline()
    numbers(pipeline, lambda: [np.int64(1)])
    pipelines = [pipeline]
    iterator = DALIGenericIterator(pipelines, ["a"], auto_reset=True, prepare_first_batch=False)
    assert iterator._pipes is pipelines, "the loader changes this list"
    text = f"DALI {VERSION} has another DALIGenericIterator.{attribute}: mend {function}()"
    assert getattr(iterator, attribute, "nothing") == value, text
    assert vars(iterator).keys() == {*ITERATOR_ATTRIBUTES}, f"DALI {VERSION} has others: mend ITERATOR_ATTRIBUTES"
    set_auto_reset(iterator, False)
    assert iterator._auto_reset == "no"
    set_epoch_size(iterator, 7, LastBatchPolicy.DROP)
    assert (iterator._size, iterator._last_batch_policy) == (7, LastBatchPolicy.DROP)


def test_operators_are_listed_without_building() -> None:
    """Those that an output depends on, with their names and the arguments that were given; the pipeline still runs."""
    pipeline = a_pipeline()
    with pipeline:
        data = fn.external_source(source=lambda: [PNG], batch=True, dtype=types.UINT8, ndim=1)
        unused = fn.external_source(source=lambda: [PNG], batch=True, dtype=types.UINT8, ndim=1)
        photo = fn.decoders.image(data, output_type=types.GRAY)
        pipeline.set_outputs(fn.resize(photo, size=(4, 4)))
    names = [operator_name(operator) for operator in operators_of(pipeline)]
    assert sorted(names) == ["ExternalSource", "Resize", "decoders__Image"], f"DALI {VERSION}: mend operator_name()"
    (decoder,) = decoders_behind([photo, 3])
    lines = argument_lines(decoder)
    assert {"device: cpu", f"output_type: {int(types.GRAY)}"} <= {*lines}, f"DALI {VERSION}: mend argument_lines()"
    assert not any(line.startswith("hw_decoder_load") for line in lines), "defaults are left out"
    assert inputs_in_use(pipeline, {"used": data, "unused": unused}) == ["used"]
    assert decoder.outputs == [photo]
    assert np.asarray(pipeline.run()[0].as_tensor()).shape == (1, 4, 4, 1)


def test_a_share_of_the_engines_is_added_to_an_operator() -> None:
    """Before the pipeline is built, as if the call had given it; a share that the graph gave stays."""
    pipeline = a_pipeline()
    with pipeline:
        data = fn.external_source(source=lambda: [PNG], batch=True, dtype=types.UINT8, ndim=1)
        photos = [fn.decoders.image(data), fn.decoders.image(data, hw_decoder_load=0.75)]
        photos.append(fn.cast(fn.decoders.inflate(data, dtype=types.UINT8, shape=[1]), dtype=types.UINT8))
        pipeline.set_outputs(*photos)
    decoders = decoders_behind(photos)
    add_decoder_arguments(decoders, hw_decoder_load=0.25)
    shares = [line for decoder in decoders for line in argument_lines(decoder) if line.startswith("hw_decoder_load")]
    text = f"DALI {VERSION}: mend add_decoder_arguments()"
    assert sorted(shares) == ["hw_decoder_load: 0.250000", "hw_decoder_load: 0.750000"], text


def test_every_decoder_is_found_by_its_name() -> None:
    """All operators in DALI's decoder modules, and all that take a share of the engines, have ``decoder`` in theirs."""
    for schema in all_operators():
        is_decoder = "decoders" in schema.ModulePath() or schema.HasArgument("hw_decoder_load")
        expected = "decoder" in schema.Name().lower()
        assert is_decoder <= expected, f"DALI {VERSION}: '{schema.Name()}' decodes: mend _is_decoder()"


def test_random_operators_are_those_that_take_a_seed() -> None:
    """Readers take one, too, and are no operators of a graph."""
    seeded = {schema.Name() for schema in all_operators() if schema.HasRandomSeedArg()}
    expected = {"random__Uniform", "random__CoinFlip", "noise__Gaussian", "decoders__ImageRandomCrop", "CoinFlip"}
    assert expected <= seeded, f"DALI {VERSION}: mend random_operators()"
    assert not {"Resize", "CropMirrorNormalize", "decoders__Image", "ExternalSource"} & seeded
    pipeline = a_pipeline()
    with pipeline:
        data = fn.external_source(source=lambda: [PNG], batch=True, dtype=types.UINT8, ndim=1)
        noisy = fn.noise.gaussian(fn.decoders.image_random_crop(data))
        pipeline.set_outputs(fn.flip(noisy, horizontal=fn.random.coin_flip()))
    assert random_operators(pipeline) == ["decoders__ImageRandomCrop", "noise__Gaussian", "random__CoinFlip"]


def test_batches_are_scheduled_one_by_one() -> None:
    """DALI's own first run would pull as many batches as its queue holds; the end and a reset are as without."""
    options: dict[str, Any] = {"batch_size": 1, "num_threads": 1, "device_id": None, "exec_dynamic": True}
    pipeline, pulled = QuickPipeline(**options, prefetch_queue_depth=3), []

    def source() -> list[np.int64]:
        if len(pulled) % 3 == 2:
            pulled.append(-1)
            raise StopIteration
        pulled.append(len(pulled))
        return [np.int64(pulled[-1])]

    numbers(pipeline, source)
    DALIGenericIterator([pipeline], ["a"], prepare_first_batch=False)  # it claims the pipeline for iterators
    for _ in range(2):
        start = len(pulled)
        for number in range(2):
            schedule_batch(pipeline)
            text = f"DALI {VERSION} pulls {len(pulled) - start} batches for {number + 1}: mend schedule_batch()"
            assert len(pulled) - start == number + 1, text
        taken = []
        for _ in range(2):
            taken.append(int(pipeline.share_outputs()[0].as_array()[0]))
            pipeline.release_outputs()
        schedule_batch(pipeline)  # the end
        with pytest.raises(StopIteration):
            pipeline.share_outputs()
        pipeline.reset()
        assert taken == pulled[start : start + 2]


def test_memory_of_batches_is_reused(tmp_path: Path) -> None:
    """120 batches of 100 kB photos, each case in a process of its own: fewer than half the page faults of ``malloc``,
    which the user can choose in the environment.
    """
    shards = write_shards(tmp_path, make_samples([(700, 500)] * 64), per_shard=32)
    base = {name: value for name, value in os.environ.items() if "MALLOC" not in name}
    faults = [
        float(subprocess.check_output([sys.executable, "-c", EPOCHS, shards], text=True, env=base | chosen))
        for chosen in ({}, {"DALI_MALLOC_POOL_THRESHOLD": "32M"}, {"MALLOC_MMAP_MAX_": "0"})
    ]
    assert faults[0] < 0.5 * min(faults[1:]), f"page faults a sample: {faults}"


EPOCHS = """
import resource, sys
import dali_pipes as dp
from nvidia.dali import fn

def graph(components, random):
    return {"shape": fn.peek_image_shape(components["image.jpg"], adjust_orientation=False)}

decode = dp.Decode(reader="webdataset")  # the other reader has memory of its own
with dp.loader(sys.argv[1], graph, batch_size=16, device="cpu", decode=decode) as loader:
    for epoch in range(35):
        if epoch == 5:
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in loader:
            pass
        loader.reset()
    print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) / (30 * loader.num_samples))
"""


def test_an_output_that_is_no_node_goes_to_the_gpu_as_a_constant() -> None:
    """As DALI takes it on the CPU."""
    with Pipeline(batch_size=1, num_threads=1, device_id=0):
        node = fn.random.uniform()
        assert [on_gpu(output).device for output in (node, 2, types.Constant(3))] == ["gpu"] * 3


DECODERS = {
    "fn.image": lambda data, kind: fn.decoders.image(data, output_type=kind),
    "fn.image_crop": lambda data, kind: fn.decoders.image_crop(data, crop=(4, 4), output_type=kind),
    "fn.image_random_crop": lambda data, kind: fn.decoders.image_random_crop(data, output_type=kind),
    "fn.image_slice": lambda data, kind: fn.decoders.image_slice(data, [0.0, 0.0], [0.5, 0.5], output_type=kind),
    "fn.experimental": lambda data, kind: fn.experimental.decoders.image(data, output_type=kind),
    "ops": lambda data, kind: ops.decoders.Image(output_type=kind)(data),
    "called": lambda data, kind: ops.decoders.Image()(data, output_type=kind),
    "number": lambda data, kind: fn.decoders.image(data, output_type=int(kind)),
}


@pytest.mark.parametrize("decode", DECODERS.values(), ids=DECODERS)
def test_any_data_is_refused_wherever_it_stands(decode, recwarn: pytest.WarningsRecorder) -> None:
    """Every decoder, however it is made, behind other operators, also those that DALI warns of as deprecated; the same
    decoder of another type is allowed.
    """
    for kind in (types.RGB, types.GRAY, types.ANY_DATA):
        pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, exec_dynamic=True)
        with pipeline:
            data = fn.external_source(source=lambda: [np.frombuffer(mask_bytes(0, 8, 8), np.uint8)], batch=True)
            size = fn.cast(decode(data, kind).shape(), dtype=types.FLOAT)
            pipeline.set_outputs(data, size * 2)
        if kind == types.ANY_DATA:
            text = r"decoder '.*' of the graph has output_type=types.ANY_DATA, .*; give it output_type=types.RGB, or t"
            with pytest.raises(ValueError, match=text):
                refuse_any_data(pipeline)
        else:
            refuse_any_data(pipeline)
            assert len(pipeline.run()) == 2  # it can still be built and run


def test_decoded_inputs_and_shared_crops_are_found_behind_other_operators() -> None:
    """What an image decoder gets, and what one crop cuts; audio, crops and other inputs of a decoder are no photos."""
    pipeline = Pipeline(batch_size=1, num_threads=1, device_id=None, exec_dynamic=True)

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
    assert decoded_inputs(pipeline, photos) == expected
    assert shared_crops(pipeline, photos, arrays) == [set("abc")]
