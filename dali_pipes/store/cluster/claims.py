"""Create an object that no other writer replaces, in a store whose writes have no conditions, as AIStore's.

A writer first writes a claim, an object of its own beside the wanted one, and then lists all claims. It goes on only if
there is no other's. Of two writers, the one that wrote its claim later sees the claim of the other, or the finished
object, so at most one of them goes on. If both see each other, both withdraw their claims and try again after pauses of
random lengths.

A writer that is stopped leaves its claim behind. Its own job, run again, ignores that claim; other jobs are told.
"""

import random
import secrets

from dali_pipes.errors import StoreError, shown
from dali_pipes.store.base import Store
from dali_pipes.store.patience import pause

NUM_ATTEMPTS = 6
LONGEST_PAUSE_S = 1.0


def write_claimed(store: Store, name: str, data: bytes, *, by: str) -> bool:
    """See `Store.write_new`."""
    start = f"{name}.claim-"
    own_job = f"{start}{by}-"
    claim = f"{own_job}{secrets.token_hex(8)}"
    failure: StoreError | None = None
    for attempt in range(NUM_ATTEMPTS):
        if attempt:
            pause(random.uniform(0, LONGEST_PAUSE_S))
        if store.size(name) is not None:
            return False
        store.write(claim, b"claimed")
        try:
            claims = [entry.name for entry in store.list_all(start)]
        except StoreError as exc:  # also where claims come and go
            failure = exc
            store.delete(claim)
            continue
        others = [found for found in claims if not found.startswith(own_job)]
        if not others:
            is_new = store.size(name) is None
            if is_new:
                store.write(name, data)
            # Once the object is there, no claim matters any more.
            for found in claims:
                store.delete(found)
            return is_new
        store.delete(claim)
        failure = StoreError(
            f"cannot create '{store.locate(name)}': another job has claimed this name ({shown(others)}) and has not "
            "written it; if that job is at work, wait for it; if it was stopped, run it again, or delete its claim"
        )
    assert failure is not None, "each attempt ends or fails"
    raise failure
