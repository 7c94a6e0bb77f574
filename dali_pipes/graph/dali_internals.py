"""Use undocumented parts of DALI: this is the one module that an upgrade of DALI can break.

Written for DALI 2.4. `tests/dali_pipes/graph/test_dali_internals.py` checks all assumptions of this module.
"""

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from nvidia.dali import backend, types
from nvidia.dali.data_node import DataNode
from nvidia.dali.pipeline import Pipeline
from nvidia.dali.plugin.base_iterator import LastBatchPolicy

if TYPE_CHECKING:
    from nvidia.dali.plugin.pytorch import DALIGenericIterator

# Memory of CPU tensors: DALI takes the first of these thresholds that is set.
_THRESHOLDS = ("DALI_MALLOC_POOL_THRESHOLD", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def pool_host_memory() -> None:
    """Have DALI reuse the memory of CPU tensors from 64 KiB on, unless the environment has a threshold.

    By default DALI takes all tensors below 32 MiB from ``malloc``, which returns their pages to the kernel and gets new
    ones for the next batch: up to one page fault for each 4 KiB. DALI reads the threshold when it first allocates.
    """
    if not any(os.environ.get(name) for name in _THRESHOLDS):  # DALI takes an empty one for none
        os.environ[_THRESHOLDS[0]] = "64k"


# Operators: ``Pipeline._ops``, and of an operator ``spec``, ``name``, ``inputs`` and ``outputs``.


def operators_of(pipeline: Pipeline) -> list[Any]:
    """List the operators on which an output of ``pipeline`` depends; its outputs are set, it need not be built."""
    if not pipeline._py_graph_built:
        pipeline._build_graph()  # makes the list, as building the pipeline would, but starts no thread
    return list(pipeline._ops)


def operator_name(operator: Any) -> str:
    """The name of an operator in DALI's registry, such as ``decoders__Image``."""
    return str(operator.spec).removeprefix("OpSpec for ").partition(":")[0]


def argument_lines(operator: Any) -> list[str]:
    """List the arguments of an operator as ``"name: value"``, without those that have their default value."""
    return [line.strip() for line in str(operator.spec).partition("\n  Arguments:\n")[2].splitlines()]


def inputs_in_use(pipeline: Pipeline, nodes: Mapping[str, Any]) -> list[str]:
    """List the names of the ``nodes`` on which an output of ``pipeline`` depends; each has an operator of its own."""
    operators = {id(operator) for operator in operators_of(pipeline)}
    return [name for name, node in nodes.items() if id(node.source) in operators]


def decoders_behind(nodes: Iterable[Any]) -> list[Any]:
    """List the decoding operators on which these outputs depend, each once; numbers depend on none."""
    return [operator for operator in _operators_behind(nodes) if _is_decoder(operator)]


def _operators_behind(nodes: Iterable[Any], *, only_decoded: bool = False) -> list[Any]:
    """List all operators behind these nodes; with ``only_decoded`` behind a decoder only what it decodes."""
    found: dict[int, Any] = {}
    waiting = list(nodes)
    while waiting:
        operator = getattr(waiting.pop(), "source", None)
        if operator is None or id(operator) in found:
            continue
        found[id(operator)] = operator
        waiting += operator.inputs[:1] if only_decoded and _takes_a_photo(operator) else operator.inputs
    return list(found.values())


def _sources(nodes: Iterable[Any]) -> set[int]:
    return {id(operator) for operator in _operators_behind(nodes, only_decoded=True)}


def decoded_inputs(pipeline: Pipeline, nodes: Mapping[str, Any]) -> dict[str, set[bool]]:
    """Find those of the ``nodes`` whose bytes an image decoder of the pipeline gets, or one that reads a header.

    Returns:
        Name -> whether these decoders turn a photo upright by its EXIF orientation; both values if they differ.
    """
    found: dict[str, set[bool]] = {}
    for operator in operators_of(pipeline):
        if not _takes_a_photo(operator):
            continue
        # Its other inputs, such as a crop, may come from encoded bytes as well, but these are not decoded here.
        photos = _sources([operator.inputs[0]])
        is_turned = "adjust_orientation: False" not in argument_lines(operator)  # DALI turns by default
        for name, node in nodes.items():
            if id(node.source) in photos:
                found.setdefault(name, set()).add(is_turned)
    return found


def shared_crops(pipeline: Pipeline, nodes: Mapping[str, Any], arrays: Mapping[str, Any]) -> list[set[str]]:
    """List the ``nodes`` that are cropped by the same ``arrays``, in pixels: sets of two or more names.

    Such crops are inputs of decoders that decode a crop, and of a ``fn.slice`` of a decoder's output.
    """
    cropped: dict[frozenset[str], set[str]] = {}
    for operator in operators_of(pipeline):
        source = getattr(operator.inputs[0], "source", None) if len(operator.inputs) > 1 else None
        is_slice = operator_name(operator) == "Slice" and source is not None and _takes_a_photo(source)
        if not is_slice and (source is None or not _takes_a_photo(operator)):
            continue
        photos, crops = _sources([operator.inputs[0]]), _sources(operator.inputs[1:])
        crop = frozenset(name for name, array in arrays.items() if id(array.source) in crops)
        if crop:
            names = {name for name, node in nodes.items() if id(node.source) in photos}
            cropped.setdefault(crop, set()).update(names)
    return [names for names in cropped.values() if len(names) > 1]


def add_decoder_arguments(decoders: Iterable[Any], **arguments: float | int) -> None:
    """Give arguments, such as ``hw_decoder_load=0.5``, to decoders whose pipeline is not built yet.

    A decoder keeps what the graph has set; a decoder that does not know the argument goes without.
    """
    for decoder in decoders:
        given = {line.partition(": ")[0] for line in argument_lines(decoder)}
        schema = backend.GetSchema(operator_name(decoder))
        for name, value in arguments.items():
            if name not in given and schema.HasArgument(name):
                # A pipeline has no defaults for its operators' arguments, and the user wrote the graph. So the argument
                # is added to the operator's specification, as the operator's call would have done.
                decoder.spec.AddArg(name, value)


def is_mixed(operator: Any) -> bool:
    """Whether an operator takes its inputs on the CPU and gives its outputs on the GPU, as decoders on a GPU do."""
    return "device: mixed" in argument_lines(operator)


def refuse_any_data(pipeline: Pipeline) -> None:
    """Refuse decoders with ``output_type=types.ANY_DATA``: in DALI 2.4 a gray JPEG then ends the process (SIGSEGV)."""
    for operator in operators_of(pipeline):
        if _is_decoder(operator) and f"output_type: {int(types.ANY_DATA)}" in argument_lines(operator):
            raise ValueError(
                f"decoder '{operator.name}' of the graph has output_type=types.ANY_DATA, with which a gray JPEG ends "
                "the process; give it output_type=types.RGB, or types.GRAY for masks"
            )


def random_operators(pipeline: Pipeline) -> list[str]:
    """List DALI's own random operators in a graph by name, each once: those that take a seed, except readers."""
    names = {operator_name(operator) for operator in operators_of(pipeline)}
    schemas = [(name, backend.TryGetSchema(name)) for name in sorted(names) if "eader" not in name]
    # Operators that are written in Python have no schema.
    return [name for name, schema in schemas if schema is not None and schema.HasRandomSeedArg()]


def refuse_sources(pipeline: Pipeline, nodes: Iterable[Any]) -> None:
    """Refuse sources and readers of DALI in a graph, but those of ``nodes``.

    DALI takes from a source ahead. What was taken for steps that an epoch has not is dropped: from then on the source's
    data belong to other samples.

    Raises:
        ValueError: If there is one.
    """
    own = {id(node.source) for node in nodes}
    others = {operator_name(operator) for operator in operators_of(pipeline) if id(operator) not in own}
    if found := sorted(
        name for name in others if "ExternalSource" in name or "reader" in name.lower() or "inputs__" in name
    ):
        raise ValueError(
            f"the graph has a source of its own ({', '.join(found)}), whose data would be given to other samples after "
            "an epoch's end; make a batch's arrays with components.array(), or keep the data in a component of the "
            "samples and read it with components.parsed()"
        )


def on_gpu(output: Any) -> Any:
    """Move a graph's output to the GPU. A constant, such as a number, is first made a node, as DALI does on the CPU."""
    if isinstance(output, DataNode):
        return output.gpu()
    value = output.value if isinstance(output, types.ScalarConstant) else output
    return types.Constant(value, device="cpu").gpu()


def _is_decoder(operator: Any) -> bool:
    # One rule for all names of DALI 2.4: decoders__Image, experimental__decoders__Image, and the deprecated
    # ImageDecoder and AudioDecoder, which are separate operators in a pipeline's list.
    return "decoder" in operator_name(operator).lower()


def _takes_a_photo(operator: Any) -> bool:
    name = operator_name(operator).lower()
    is_of_others = any(kind in name for kind in ("audio", "video", "numpy", "inflate"))
    takes_photos = (_is_decoder(operator) and not is_of_others) or "peekimage" in name
    return takes_photos and len(operator.inputs) > 0


# Running a pipeline: ``_first_iter`` and ``_check_api_type_scope``.


class QuickPipeline(Pipeline):  # type: ignore[misc]
    """A pipeline that may be called in any way, also after `DALIGenericIterator` has claimed it for its own calls.

    To check the calls, DALI makes a new class in each of five calls a batch, 7 us each.
    """

    def _check_api_type_scope(self, type: Any) -> AbstractContextManager[None]:
        return nullcontext()


def schedule_batch(pipeline: Pipeline) -> None:
    """Pull one batch of inputs and start to compute it. At the end of the epoch's inputs this does nothing.

    DALI's own first run pulls as many batches as its queue holds: a loader would wait for the shards of its second
    batch before it can deliver the first.
    """
    pipeline._first_iter = False
    pipeline.schedule_run()


# The end of a pipeline: ``_shutdown``. It waits for the pipeline's threads, and the garbage collector must not call it.
# The collector may run in such a thread, which cannot wait for itself, because our operators are Python code. It may
# also run in a forked process, which does not have these threads and would wait forever.

_alive: set[Pipeline] = set()


def keep_pipeline(pipeline: Pipeline) -> None:
    """Keep a pipeline from the garbage collector until `end_pipeline`; called for every pipeline that is made."""
    _alive.add(pipeline)


def end_pipeline(pipeline: Pipeline) -> None:
    """Wait until the operators of a pipeline have returned, and end its threads. Can be called twice."""
    pipeline._shutdown()
    _alive.discard(pipeline)


# DALIGenericIterator, for subclasses that count batches themselves: ``_pipes``, ``_size``, ``_last_batch_policy`` and
# ``_auto_reset``. Loops that were written for DALI's iterators read them, and so does Lightning.


ITERATOR_ATTRIBUTES = (
    *("batch_size", "output_map", "_auto_reset", "_counter", "_enable_checkpointing", "_ever_consumed"),
    *("_ever_scheduled", "_first_batch", "_last_batch_padded", "_last_batch_policy", "_num_gpus", "_output_categories"),
    *("_pipes", "_prepare_first_batch", "_reader_name", "_size"),
)
"""The attributes that DALI's constructor sets without a reader; ``_pipes`` is the list that it is given."""


def set_epoch_size(iterator: "DALIGenericIterator", size: int, last_batch_policy: LastBatchPolicy) -> None:
    """Set the samples of a rank in an epoch, and the policy, which DALI takes to be FILL if it knows no size."""
    iterator._size, iterator._last_batch_policy = size, last_batch_policy


def set_auto_reset(iterator: "DALIGenericIterator", is_automatic: bool) -> None:
    """Set whether ``iterator`` starts the next epoch by itself at the end of one."""
    iterator._auto_reset = "yes" if is_automatic else "no"
