"""Hold what all connections of an embedded node share: its objects, its names, and who may use it."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from prep.embedded.etl import Etls
from prep.embedded.peer import Address, is_own
from prep.embedded.storage import Storage

if TYPE_CHECKING:
    from prep.embedded.connection import NodeConnection


@dataclass(kw_only=True)
class Node:
    """One process that is a whole cluster: proxy and target at one address."""

    storage: Storage
    port: int
    etls: Etls | None = None
    """The transforms; ``None`` if the node runs none."""
    is_open: bool = False
    """Whether processes of other users may use the node."""
    before_request: Callable[["NodeConnection"], None] | None = None
    started_ns: int = field(default_factory=time.time_ns)
    uuid: str = field(default_factory=lambda: os.urandom(6).hex())

    def __post_init__(self) -> None:
        self.endpoint = f"http://127.0.0.1:{self.port}"
        self.proxy_id, self.target_id = f"embp{self.port}", f"embt{self.port}"

    def refuses(self, client: Address) -> str | None:
        """Return why a connection from this address is not answered; ``None`` if it is."""
        if self.is_open or is_own(client, ("127.0.0.1", self.port)):
            return None
        return (
            f"this embedded node answers only processes of its own user, id {os.geteuid()}; run your command as that "
            "user, start a node of your own, or let its owner start it with: dali-pipes prep embedded --open"
        )
