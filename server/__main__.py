"""`python -m server`."""

import gc
import sys

gc.disable()  # imports make a million objects that stay
from server.cli import main  # noqa: E402

gc.enable()
sys.exit(main(sys.argv[1:]))
