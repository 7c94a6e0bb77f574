"""Keep pipelines from being destroyed in a forked process.

Destroying a pipeline joins its threads. A forked child has none of these threads and would wait forever, for instance
when its garbage collector finds a loader that the parent has dropped. So a child keeps every pipeline that was alive at
the fork.
"""

import os
import weakref

_alive: "weakref.WeakSet[object]" = weakref.WeakSet()
_inherited: list[object] = []


def keep_in_children(pipeline: object) -> None:
    """Register a pipeline; call this for every pipeline that is made."""
    _alive.add(pipeline)


os.register_at_fork(after_in_child=lambda: _inherited.extend(_alive))
