"""`python -m zerokern` is the `zerokern` command."""

import sys

from zerokern.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
