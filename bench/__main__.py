"""Run ``dali-pipes bench`` as ``python -m bench``."""

import sys

from dali_pipes.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "bench")
    sys.exit(main())
