"""`python -m mafrt COMMAND` is `mafrt COMMAND`."""

import sys

from mafrt.scripts.main import main

if __name__ == "__main__":
    sys.exit(main())
