"""``python -m cswe``."""

import sys

from cswe.cli import main

if __name__ == "__main__":
    sys.exit(main())
