"""What a graph returns: its outputs, the photos that it decodes, and the type of a batch that is made of them."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import numpy as np

from dali_pipes.errors import DataError
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.graph.dali_internals import (
    QuickPipeline,
    add_decoder_arguments,
    decoded_inputs,
    is_mixed,
    shared_crops,
)
from dali_pipes.graph.finish import FinishedOutput, FinishThreads, finish_images, finish_packed
from dali_pipes.graph.inputs import Components, DecodedPhotos, GraphInputs, PackedOutput
from dali_pipes.graph.parse import Parser
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Places

LABEL_OUTPUT = "label"
"""The name of the class id in the graphs of `dali_pipes.graph.pipelines`, which leave it out if there is none."""
CU_SEQLENS = "cu_seqlens"
"""The output beside a packed one: where each sample begins in it, and its length."""
# What the engines of one decoder may preallocate, if nvJPEG takes an RGB picture of the hinted size for each sample of
# a batch. It does not say what it takes; 1 GiB is little on a GPU that has engines (24 GB or more), and enough for 256
# photos of 1.4 million pixels.
MAX_PREALLOCATED_BYTES = 2**30
_JPEG = PHOTO_FORMATS.index("JPEG")

Graph = Callable[[Components, Random], Mapping[str, Any]]
"""The function that the decode pipeline runs: it returns the outputs by name, in the order of a batch, as nodes and
results of `Components.text` and the like. `dali_pipes.graph.pipelines` has some to copy."""

if TYPE_CHECKING:
    from torch import Tensor

    class BatchDict(dict[str, Any]):
        """A batch: the graph's outputs by name, each of shape [batch, ...]; at run time a plain dict.

        ``"image"``, ``"mask"`` and ``"label"`` are the tensors of the graphs of `dali_pipes.graph.pipelines`;
        ``"key"`` and ``"valid"`` are what `Outputs` adds. A graph of your own may have other names, of any type.
        """

        @overload
        def __getitem__(self, name: Literal["image", "mask", "label", "valid", "cu_seqlens"], /) -> Tensor: ...
        @overload
        def __getitem__(self, name: Literal["key"], /) -> list[str]: ...
        @overload
        def __getitem__(self, name: str, /) -> Any: ...
        def __getitem__(self, name: str, /) -> Any: ...

else:
    BatchDict = dict[str, Any]


def label_advice(given: Sequence[str]) -> str:
    """The end of an error about outputs that do not fit: what to do if it may be the label that is missing."""
    if LABEL_OUTPUT in given:
        return ""
    return (
        f"; there is no '{LABEL_OUTPUT}': the built-in graphs give it if samples have a component 'cls' "
        "(dali-pipes prep pack imagefolder writes it)"
    )


def output_nodes(outputs: object, components: Components, threads: FinishThreads | None) -> list[Any]:
    """Check a graph's outputs, note those that are not tensors, and return the others, as nodes or constants.

    What is finished on the CPU becomes nodes; images work in ``threads``, and with ``None`` they stay decoded pixels.
    """
    inputs = components.inputs
    if not isinstance(outputs, Mapping) or not outputs:
        raise ValueError(f"graph must return a dict of outputs by name, got {type(outputs).__name__}")
    if not inputs.read:
        raise ValueError(
            "graph takes none of the components; it must take at least one, such as components['image.jpg']: samples "
            "come from the shards, and from no reader of the graph's own"
        )
    inputs.lists = {name: output for name, output in outputs.items() if isinstance(output, Parser)}
    packed = [name for name, output in outputs.items() if isinstance(output, PackedOutput)]
    if len(packed) > 1 or (packed and CU_SEQLENS in outputs):
        raise ValueError(
            f"a graph can have one packed output and adds '{CU_SEQLENS}' beside it, got {', '.join(outputs)}"
        )
    inputs.packed = packed[0] if packed else None
    finished = {name: output for name, output in outputs.items() if isinstance(output, FinishedOutput)}
    if threads is None:
        outputs = {**outputs, **{name: output.pixels for name, output in finished.items()}}
        finished = {}
    elif finished:
        threads.start()
    made = {name: finish_images(output, threads) for name, output in finished.items() if threads is not None}
    if inputs.packed:
        node = outputs[inputs.packed].node
        outputs = {**outputs, inputs.packed: node}
        if threads is not None and components.device == "cpu":
            made[inputs.packed] = finish_packed(node)
    inputs.finishers = {name: finisher for name, (finisher, _) in made.items()}
    outputs = {**outputs, **{name: node for name, (_, node) in made.items()}}
    nodes = [output for name, output in outputs.items() if name not in inputs.lists]
    # A pipeline pulls batches only if it has an output; this one is not delivered.
    return nodes or [components.array(lambda batch: batch.ordinals)]


def decoded_photos(pipeline: QuickPipeline, inputs: GraphInputs, *, turned: Mapping[str, int]) -> DecodedPhotos:
    """Find the photos that a pipeline decodes, and refuse a graph that sizes them in another way.

    The pipeline's outputs are set. ``turned`` is `Manifest.turned`.
    """
    decoded = decoded_inputs(pipeline, inputs.components)
    for component, orient in sorted(inputs.sized):
        num_turned = sum(turned.get(name, 0) for name in component.split(";"))
        if num_turned and component in decoded and orient not in decoded[component]:
            kinds = {True: "upright", False: "stored"}
            raise DataError(
                f"the graph asks for sizes or crops of {kinds[orient]} photos '{component}', and decodes them as "
                f"{kinds[not orient]} ones; {num_turned} photos of the data set have an EXIF orientation that turns "
                "them. Give one value to all: orient = components.orient(), components.size(..., orient=orient), "
                "random.resized_crop(..., orient=orient) and fn.decoders...(..., adjust_orientation=orient)"
            )
    pairs = dict.fromkeys(inputs.same_size)
    for names in shared_crops(pipeline, inputs.components, inputs.array_nodes):
        first, *others = (name for name in inputs.components if name in names)
        pairs |= dict.fromkeys((first, other) for other in others)
    return DecodedPhotos(
        tuple(name for name in inputs.components if name in decoded),
        tuple(pair for pair in pairs if decoded.keys() >= {*pair}),
        frozenset(name for name in decoded if True in decoded[name]),
    )


def set_up_engines(
    decoders: Sequence[Any],
    photos: Iterable[Places],
    *,
    hw_decoder_load: float | None,
    batch_size: int,
    max_pixels: int,
) -> None:
    """Give decoders the JPEG engines' share, and those on a GPU a size for which their engines allocate in advance.

    The operators' pipeline is not built yet; they keep what the graph has set. ``photos`` are the places of some
    photos that stand for all, by component. With ``hw_decoder_load=None`` the share is DALI's default.
    """
    if hw_decoder_load is not None:
        add_decoder_arguments(decoders, hw_decoder_load=float(hw_decoder_load))
    hint = size_hint(photos, most=min(MAX_PREALLOCATED_BYTES // (3 * batch_size), max_pixels))
    if hint is not None and hw_decoder_load != 0:
        mixed = [decoder for decoder in decoders if is_mixed(decoder)]
        add_decoder_arguments(mixed, preallocate_height_hint=hint[0], preallocate_width_hint=hint[1])


def size_hint(photos: Iterable[Places], *, most: int) -> tuple[int, int] | None:
    """Find height and width of the largest JPEG of at most ``most`` pixels; ``None`` without one.

    So one huge photo costs no memory in advance: the engines allocate for it when it comes.
    """
    hint = None
    for places in photos:
        pixels = np.where(places.format == _JPEG, places.height * places.width, 0)
        pixels[pixels > most] = 0
        if pixels.any() and (hint is None or pixels.max() > hint[0] * hint[1]):
            at = int(pixels.argmax())
            hint = int(places.height[at]), int(places.width[at])
    return hint
