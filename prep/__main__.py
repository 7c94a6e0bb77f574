"""``python -m prep``: the same commands as ``dali-pipes prep``."""

import sys

from dali_pipes.cli import main

if __name__ == "__main__":
    sys.exit(main(["prep", *sys.argv[1:]]))
