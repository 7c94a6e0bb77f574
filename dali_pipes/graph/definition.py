"""Define a graph as a DALI pipeline that pulls its inputs batch by batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from nvidia.dali import fn

from dali_pipes.graph.asked import CU_SEQLENS, GraphInputs, ListOutput, PackedOutput
from dali_pipes.graph.dali_internals import (
    QuickPipeline,
    decoded_inputs,
    decoders_behind,
    inputs_in_use,
    keep_in_children,
    on_gpu,
    outputs_of,
    random_operators,
    refuse_any_data,
    shared_crops,
)
from dali_pipes.graph.engines import set_up_engines
from dali_pipes.graph.inputs import Components
from dali_pipes.graph.orientations import check_orientations
from dali_pipes.graph.random import Random
from dali_pipes.reader.batch import Batch, DecodedPhotos
from dali_pipes.reader.samples import StoredSamples


class Graph(Protocol):
    """The function that the decode pipeline runs; `dali_pipes.graph.pipelines` has three to copy."""

    def __call__(self, components: Components, random: Random) -> Mapping[str, Any]:
        """Return the outputs by name, in the order of a batch: nodes, and results of `Components.text` and the like."""


@dataclass(frozen=True, kw_only=True)
class DefinedPipeline:
    """A pipeline that can be built, and what is known of its graph."""

    pipeline: QuickPipeline
    inputs: GraphInputs
    """The inputs that the graph asked for."""
    inputs_in_use: list[str]
    """Names of inputs on which an output depends. DALI never takes the others: they must not be queued."""
    output_names: list[str]
    num_decoders: int
    """Decoding operators on which an output depends."""
    random_operators: list[str]
    """DALI's own random operators, by name: their numbers do not belong to the sample."""
    starts_full: bool
    """Whether a short batch must not be the first that is decoded, see Note [the engines' share]."""


def define_pipeline(
    graph: Graph,
    *,
    samples: StoredSamples,
    example: Batch,
    next_input: Callable[[], Callable[[str], Any] | None],
    batch_size: int,
    device_id: int | None,
    num_threads: int,
    prefetch_queue_depth: int,
    seed: int,
    hw_decoder_load: float | None,
    only_decoders: bool,
) -> DefinedPipeline:
    """Call the graph and make a pipeline of its outputs.

    ``next_input`` gives a function that returns an input's next data by the input's name and may raise `StopIteration`,
    or ``None`` if that function is gone. The other arguments are as in `dali_pipes.graph.decode.DecodePipeline`.

    Raises:
        ValueError: If the graph does not return a dict of outputs, or takes no component.
        TypeError: If DALI cannot take one of its arrays.
    """
    pipeline = QuickPipeline(
        batch_size=batch_size,
        num_threads=num_threads,
        device_id=device_id,
        prefetch_queue_depth=prefetch_queue_depth,
        seed=seed & (2**63 - 1),  # DALI takes 63 bits
        # Outputs stay valid while they are held, and the reader's TensorLists are taken as they are.
        exec_dynamic=True,
    )
    with pipeline:
        components = Components(
            source=_source_of(next_input),
            samples=samples,
            example=example,
            device="cpu" if device_id is None else "mixed",
        )
        outputs = graph(components, Random(components))
        inputs = components.inputs
        nodes = _nodes(outputs, components)
        decoders = decoders_behind(nodes)
        starts_full = set_up_engines(
            decoders,
            photos={name: inputs.nodes[f"component/{name}"] for name in inputs.components},
            # The index of the example's shard is at hand; this shard stands for all.
            places=example.rows.of_whole_shards().places,
            hw_decoder_load=hw_decoder_load,
            batch_size=batch_size,
            max_pixels=samples.rules.photos.max_pixels,
        )
        if only_decoders:
            nodes = outputs_of(decoders) or nodes
        pipeline.set_outputs(*(nodes if device_id is None else map(on_gpu, nodes)))
    refuse_any_data(pipeline)
    inputs.decoded = _decoded_photos(pipeline, inputs, turned=samples.turned)
    keep_in_children(pipeline)
    return DefinedPipeline(
        pipeline=pipeline,
        inputs=inputs,
        inputs_in_use=inputs_in_use(pipeline, inputs.nodes),
        output_names=list(outputs),
        num_decoders=len(decoders),
        random_operators=random_operators(pipeline),
        starts_full=starts_full,
    )


def _source_of(next_input: Callable[[], Callable[[str], Any] | None]) -> Callable[[str, Any, int], Any]:
    def source(name: str, dtype: Any, ndim: int) -> Any:
        return fn.external_source(
            source=lambda: pull(name) if (pull := next_input()) is not None else None,
            batch=True,
            dtype=dtype,
            ndim=ndim,
            # DALI shares the TensorList, which lives until it is decoded. Decoders on the CPU read it where it is.
            # Those on a GPU do so if it is page-locked; otherwise DALI makes a page-locked copy in its threads.
            no_copy=name.startswith("component/"),
        )

    return source


def _nodes(outputs: object, components: Components) -> list[Any]:
    """Check a graph's outputs, and return its tensors, as nodes or constants."""
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


def _decoded_photos(pipeline: QuickPipeline, inputs: GraphInputs, *, turned: Mapping[str, int] | None) -> DecodedPhotos:
    nodes = {name: inputs.nodes[f"component/{name}"] for name in inputs.components}
    arrays = {name: node for name, node in inputs.nodes.items() if not name.startswith("component/")}
    decoded = decoded_inputs(pipeline, nodes)
    check_orientations(decoded, inputs.sized, turned=turned)
    pairs = dict.fromkeys(inputs.same_size)
    for names in shared_crops(pipeline, nodes, arrays):
        first, *others = (name for name in nodes if name in names)
        pairs |= dict.fromkeys((first, other) for other in others)
    return DecodedPhotos(
        tuple(name for name in nodes if name in decoded),
        tuple(pair for pair in pairs if decoded.keys() >= {*pair}),
        frozenset() if turned is None else frozenset(name for name in decoded if True in decoded[name]),
    )
