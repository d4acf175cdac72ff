"""`python -m server.settings > settings.env.example`."""

import sys

from server.settings import example

sys.stdout.write(example())
