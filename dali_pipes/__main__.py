"""``python -m dali_pipes``: the same commands as ``dali-pipes``."""

import sys

from dali_pipes.cli import main

sys.exit(main())
