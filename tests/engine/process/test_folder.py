"""Private folders: made, removed by their owner, and removed by others once their owner has been killed."""

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from engine.process.folder import PrivateFolder

OWNER = "from engine.process.folder import PrivateFolder; print(PrivateFolder().path, flush=True); input()"


@pytest.fixture(autouse=True)
def parent(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own, with a short path."""
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def test_private_while_it_is_there_and_then_removed(parent: Path) -> None:
    with closing(PrivateFolder()) as folder:
        assert folder.path.parent == parent
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        (folder.path / "file").write_text("")
    assert list(parent.iterdir()) == []


def test_long_temporary_folder_is_not_used(parent: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(parent / ("x" * 80)))
    with closing(PrivateFolder()) as folder:
        assert len(f"{folder.path}/service.sock") < 107


def test_folders_of_killed_owners_are_removed(parent: Path) -> None:
    """And no others: not those of living owners, nor of children that hold on to them, nor what is none of ours."""
    (parent / "trellis-other").mkdir()
    owners = [
        subprocess.Popen(
            [sys.executable, "-c", OWNER],
            env={**os.environ, "TMPDIR": str(parent)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    killed, living = owners
    paths = [Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout is not None]
    (paths[0] / "engine.sock").write_text("")
    inherited = PrivateFolder()
    with subprocess.Popen(["sleep", "60"], pass_fds=[inherited.lock]) as child:
        os.close(inherited.lock)
        killed.kill()
        killed.communicate()
        with closing(PrivateFolder()) as folder:
            left = {parent / "trellis-other", paths[1], inherited.path, folder.path}
            assert set(parent.iterdir()) == left
        child.kill()
    living.kill()
    living.communicate()
    with closing(PrivateFolder()) as folder:
        assert set(parent.iterdir()) == {parent / "trellis-other", folder.path}


def test_no_folder_is_removed_while_it_is_being_made(parent: Path) -> None:
    def make(_: int) -> bool:
        with closing(PrivateFolder()) as folder:
            return folder.path.exists()

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(make, range(200)))
    assert list(parent.iterdir()) == []
