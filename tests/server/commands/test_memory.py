"""`trellis memory`: serves until a signal, and shows what it owns."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.memory.client import HostPages, acquire
from server.cli import main
from server.process.serving import FAILURE

ROOT = Path(__file__).resolve().parents[3]


def test_a_service_owns_memory_until_a_signal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    socket = tmp_path / "run" / "memory.sock"
    flags = ["--memory-service", str(socket), "--memory-service-limit-mb", "8"]
    assert main(["memory", *flags, "--status"]) == 1
    assert "no memory service: none answers" in capsys.readouterr().err
    command = [sys.executable, "-m", "server", "memory", *flags]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as service:
        assert service.stderr is not None
        assert f"MEMORY_SERVICE={socket}" in service.stderr.readline()
        pages = HostPages(acquire(socket, 1 << 20, "panels", b"files", lambda: b"weights"), 1 << 20)
        pages.done()
        assert main(["memory", *flags, "--status"]) == 0
        out = capsys.readouterr().out
        assert "1 MB of at most 8 MB of weights" in out and "1 lease(s)" in out and "filled 1" in out
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert second.returncode == FAILURE and "already answers" in second.stderr
        os.kill(service.pid, signal.SIGTERM)
        assert service.wait(30) == 0
    assert not socket.exists()


def test_help_names_the_settings(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", "--help"]) == 0
    assert "--memory-service" in capsys.readouterr().out
