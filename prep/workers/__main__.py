"""The program of a worker process: see `prep.workers.processes`."""

import sys

from prep.workers.processes import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
