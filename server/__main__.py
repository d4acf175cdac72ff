"""`python -m server`."""

import sys

from server.cli import main

sys.exit(main(sys.argv[1:]))
