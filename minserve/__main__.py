"""`python -m minserve` is the `minserve` command."""

import sys

from minserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
