"""``python -m egmctl``."""

import sys

from egmctl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
