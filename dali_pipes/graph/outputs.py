"""The type of a delivered batch, for type checkers and for the names that an editor proposes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

LABEL_OUTPUT = "label"
"""The name of the class id in the graphs of `dali_pipes.graph.pipelines`, which leave it out if there is none."""

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
