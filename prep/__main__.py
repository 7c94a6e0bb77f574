"""``python -m prep``: the same commands as ``dali-pipes prep``."""

import sys

from dali_pipes.cli import main

if __name__ == "__main__":
    sys.argv.insert(1, "prep")
    sys.exit(main())
