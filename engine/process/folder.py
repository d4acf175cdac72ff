"""Folders for the sockets and files of processes that run together, below the system's temporary folder."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

_PREFIX = "trellis-run-"
_LONGEST_PATH = 100
"""Maximum bytes in the path of a Unix socket; the system's own limit is 107."""
_LONGEST_NAME = len("/service.sock")


class PrivateFolder:
    """A new folder that only this user may enter, with a path short enough for a Unix socket.

    `close` removes it. Folders of killed processes are removed when the next folder is made: a folder in use is locked,
    and the system releases the locks of a process that ends.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        if len(str(parent / _PREFIX)) + 8 + _LONGEST_NAME > _LONGEST_PATH:
            parent = Path("/tmp")
        _remove_abandoned(parent)
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
            with suppress(FileNotFoundError):  # removed before it was locked
                self.lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
                """Descriptor of the lock. A child process that inherits it holds the lock, too."""
                with suppress(OSError):  # a file system without locks: nobody removes the folder there
                    fcntl.flock(self.lock, fcntl.LOCK_SH)
                if self.path.exists():
                    return
                os.close(self.lock)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:  # removed meanwhile, or another user's
            continue
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(descriptor).st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
        except OSError:  # in use
            pass
        finally:
            os.close(descriptor)
