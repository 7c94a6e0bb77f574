"""Check what a graph returns, find which photos it decodes and how, and prepare a GPU's JPEG engines for it."""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, Protocol

import numpy as np

from dali_pipes.errors import DataError
from dali_pipes.formats.photo_header import PHOTO_FORMATS
from dali_pipes.graph.dali_internals import (
    QuickPipeline,
    add_decoder_arguments,
    decoded_inputs,
    is_mixed,
    photos_of,
    shared_crops,
)
from dali_pipes.graph.inputs import Components, DecodedPhotos, GraphInputs
from dali_pipes.graph.outputs import CU_SEQLENS, ListOutput, PackedOutput
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Places

# What the engines of one decoder may preallocate, if nvJPEG takes an RGB picture of the hinted size for each sample of
# a batch. It does not say what it takes; 1 GiB is little on a GPU that has engines (24 GB or more), and enough for 256
# photos of 1.4 million pixels.
MAX_PREALLOCATED_BYTES = 2**30
_JPEG = PHOTO_FORMATS.index("JPEG")


class Graph(Protocol):
    """The function that the decode pipeline runs; `dali_pipes.graph.pipelines` has three to copy."""

    def __call__(self, components: Components, random: Random) -> Mapping[str, Any]:
        """Return the outputs by name, in the order of a batch: nodes, and results of `Components.text` and the like."""


def output_nodes(outputs: object, components: Components) -> list[Any]:
    """Check a graph's outputs, note those that are not tensors, and return the others, as nodes or constants.

    Raises:
        ValueError: If the graph does not return a dict of outputs, or takes no component.
    """
    inputs = components.inputs
    if not isinstance(outputs, Mapping) or not outputs:
        raise ValueError(f"graph must return a dict of outputs by name, got {type(outputs).__name__}")
    if not inputs.read:
        raise ValueError(
            "graph takes none of the components; it must take at least one, such as components['image.jpg']"
        )
    inputs.lists = {name: output.parser for name, output in outputs.items() if isinstance(output, ListOutput)}
    packed = [name for name, output in outputs.items() if isinstance(output, PackedOutput)]
    if len(packed) > 1:
        raise ValueError(f"a graph can have one packed output, got {', '.join(packed)}; return the others padded")
    if packed and CU_SEQLENS in outputs:
        raise ValueError(f"'{CU_SEQLENS}' is added beside the packed output '{packed[0]}'; rename that of the graph")
    inputs.packed = packed[0] if packed else None
    nodes = [
        output.node if isinstance(output, PackedOutput) else output
        for name, output in outputs.items()
        if name not in inputs.lists
    ]
    # A pipeline pulls batches only if it has an output; this one is not delivered.
    return nodes or [components.array(lambda batch: batch.ordinals)]


def decoded_photos(pipeline: QuickPipeline, inputs: GraphInputs, *, turned: Mapping[str, int]) -> DecodedPhotos:
    """Find the photos that a pipeline decodes; its outputs are set. ``turned`` is `Manifest.turned`.

    Raises:
        DataError: If the graph sizes photos in another way than it decodes them.
    """
    decoded = decoded_inputs(pipeline, inputs.components)
    _check_orientations(decoded, inputs.sized, turned=turned)
    pairs = dict.fromkeys(inputs.same_size)
    for names in shared_crops(pipeline, inputs.components, inputs.array_nodes):
        first, *others = (name for name in inputs.components if name in names)
        pairs |= dict.fromkeys((first, other) for other in others)
    return DecodedPhotos(
        tuple(name for name in inputs.components if name in decoded),
        tuple(pair for pair in pairs if decoded.keys() >= {*pair}),
        frozenset(name for name in decoded if True in decoded[name]),
    )


def _check_orientations(
    decoded: Mapping[str, Set[bool]], sized: Iterable[tuple[str, bool]], *, turned: Mapping[str, int]
) -> None:
    """Compare the sizes that a graph asks for with what its decoders give.

    Args:
        decoded: Component -> whether its decoders turn photos upright, as `decoded_inputs` finds it.
        sized: Components whose size the graph asked for, each with whether the size is that of the upright photo.
        turned: `Manifest.turned`. A data set without photos that are turned takes any graph.

    Raises:
        DataError: If the photos of a component are turned, and the graph decodes them in another way than it sizes
            them: names the component, and the arguments that must be equal.
    """
    for component, orient in sorted(sized):
        num_turned = sum(turned.get(name, 0) for name in component.split(";"))
        if num_turned and component in decoded and orient not in decoded[component]:
            raise DataError(
                f"the graph asks for sizes or crops of {_seen(orient)} photos '{component}', and decodes them as "
                f"{_seen(not orient)} ones: adjust_orientation={not orient}; {num_turned} photos of the data set have "
                "an EXIF orientation that turns them. In the graph, give one value to all: orient = "
                f"components.orient(), components.size('{component}', orient=orient), random.resized_crop(..., "
                "orient=orient) and fn.decoders...(..., adjust_orientation=orient)"
            )


def _seen(orient: bool) -> str:
    return "upright" if orient else "stored"


def set_up_engines(
    decoders: Sequence[Any],
    *,
    photos: Mapping[str, Any],
    places: Callable[[str], Places],
    hw_decoder_load: float | None,
    batch_size: int,
    max_pixels: int,
) -> bool:
    """Give decoders the engines' share, and those on a GPU the size to preallocate for; return whether engines decode.

    Args:
        decoders: Operators of a pipeline that is not built yet. They keep what the graph has set.
        photos: The nodes of encoded bytes, by component.
        places: Gives the places of a component's photos, of which `size_hint` chooses the size.
        hw_decoder_load: Share of a batch's JPEGs that the engines decode; ``None``: DALI's default.
        batch_size: Samples in a full batch.
        max_pixels: A photo of more pixels is never decoded.
    """
    if hw_decoder_load is not None:
        add_decoder_arguments(decoders, hw_decoder_load=float(hw_decoder_load))
    mixed = [decoder for decoder in decoders if is_mixed(decoder)]
    if hw_decoder_load == 0 or not mixed:
        return False
    for decoder in mixed:
        decoded = [places(component) for component in photos_of(decoder, photos)]
        hint = size_hint(decoded, batch_size=batch_size, max_pixels=max_pixels)
        if hint is not None:
            add_decoder_arguments([decoder], preallocate_height_hint=hint[0], preallocate_width_hint=hint[1])
    return True


def size_hint(photos: Sequence[Places], *, batch_size: int, max_pixels: int) -> tuple[int, int] | None:
    """Choose the height and width for which a decoder's engines preallocate; ``None`` without a JPEG that fits.

    It is the largest height and the largest width of the JPEGs, from the smallest photo up, as long as ``batch_size``
    pictures of that size fit `MAX_PREALLOCATED_BYTES`. So one huge photo costs no memory in advance: the engines then
    allocate for it when it comes. Photos of more than ``max_pixels`` are bad and never come.
    """
    heights, widths = np.concatenate(
        [np.empty((2, 0), np.int64)]
        + [np.stack([places.height, places.width])[:, places.format == _JPEG] for places in photos],
        axis=1,
    )
    order = np.argsort(heights * widths, kind="stable")
    tallest, widest = np.maximum.accumulate(heights[order]), np.maximum.accumulate(widths[order])
    most = min(MAX_PREALLOCATED_BYTES // (3 * batch_size), max_pixels)
    num_fit = int(np.searchsorted(tallest * widest, most, side="right"))
    return (int(tallest[num_fit - 1]), int(widest[num_fit - 1])) if num_fit else None
