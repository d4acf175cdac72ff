"""The command `trellis`, also `python -m trellis`; and how its child processes start.

The packages beside this file have names that other projects use, too: `server`, `routers`. They are imported from here,
whatever lies in the current folder or in PYTHONPATH. Everything else is found as usual.
"""

import gc
import importlib
import runpy
import sys
from pathlib import Path

_ROOT = str(Path(__file__).resolve().parent)
_PACKAGES = ("protocol", "engine", "multimodal", "routers", "server")


def main() -> int:
    """Run a command. `-m MODULE ARGUMENTS…` runs one of our modules instead: processes of a replica start so."""
    _import_own()
    if sys.argv[1:2] == ["-m"]:
        del sys.argv[1]
        runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
        return 0
    gc.disable()  # imports make a million objects that stay
    from server.cli import main  # noqa: PLC0415 - only now is it ours

    gc.enable()
    return main(sys.argv[1:] or ["help"])


def _import_own() -> None:
    """Import our packages from this folder. It comes first in the path only for that, if it is there anyway: before the
    standard library, packages beside ours could replace its modules.
    """
    known = _ROOT in sys.path
    sys.path.insert(0, _ROOT)
    for name in _PACKAGES:
        importlib.import_module(name)
    if known:
        del sys.path[0]


if __name__ == "__main__":
    sys.exit(main())
