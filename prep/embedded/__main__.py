"""``python -m prep.embedded``: the same as ``dali-pipes prep embedded``; also the child of ``embedded_node.start``."""

import sys

from dali_pipes.cli import main

if __name__ == "__main__":
    sys.argv[1:1] = ["prep", "embedded"]
    sys.exit(main())
