"""A directory that holds its writers up at one object; a module of its own, because worker processes import it."""

import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from dali_pipes.store.local import LocalStore


class GatedStore(LocalStore):
    """The writer of ``held`` puts its process id into ``gate/pid`` and waits until ``gate/open`` exists.

    ``gate/writes`` has a line for each write that began: its name, and the writer's process id.
    """

    def __init__(self, directory: Path, *, held: str, gate: Path) -> None:
        super().__init__(directory)
        self.held, self.gate = held, gate

    def write_stream(self, name: str, chunks: Callable[[], Iterable[memoryview]], *, num_bytes: int) -> None:
        """Write as a directory does; the held object stops after half of its bytes until the gate is open."""
        self._note(name)

        def gated() -> Iterable[memoryview]:
            for chunk in chunks():
                yield chunk[: len(chunk) // 2]
                self._wait(name)
                yield chunk[len(chunk) // 2 :]

        super().write_stream(name, gated, num_bytes=num_bytes)

    def write(self, name: str, data: bytes) -> None:
        """Write as a directory does; the held object is begun only when the gate is open."""
        self._note(name)
        self._wait(name)
        super().write(name, data)

    def _note(self, name: str) -> None:
        with (self.gate / "writes").open("a") as writes:
            writes.write(f"{name} {os.getpid()}\n")

    def _wait(self, name: str) -> None:
        if name == self.held and not (self.gate / "open").exists():
            (self.gate / "pid.partial").write_text(str(os.getpid()))
            (self.gate / "pid.partial").rename(self.gate / "pid")
            while not (self.gate / "open").exists():
                time.sleep(0.02)
