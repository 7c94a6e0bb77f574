"""An AIStore-compatible node in one process, over a folder, on loopback: for the first run, tests and laptops."""

from prep.embedded.process import EmbeddedNode, start
from prep.embedded.server import serve_forever

__all__ = ["EmbeddedNode", "serve_forever", "start"]
