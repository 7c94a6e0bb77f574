"""The signature of a graph: the user's function from a sample's components and random numbers to outputs."""

from collections.abc import Mapping
from typing import Any, Protocol

from dali_pipes.graph.inputs import Components
from dali_pipes.graph.random import Random


class Graph(Protocol):
    """What the decode pipeline runs: see the functions in `dali_pipes.graph.pipelines` for three to copy."""

    def __call__(self, components: Components, random: Random) -> Mapping[str, Any]:
        """The outputs by name, in the order of a batch: nodes, and what `Components.text` and its like return."""
