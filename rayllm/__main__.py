"""`python -m rayllm` is the command `rayllm`."""

import sys

from rayllm.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
