"""``python -m dsr1build`` is ``dsr1build``."""

import sys

from dsr1build.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
