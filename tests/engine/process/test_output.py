"""Output of a host as its parent reads it: log lines, and the reason for its end."""

import asyncio
import logging
import os
from types import SimpleNamespace
from typing import Any

import pytest

from engine.kit import logs
from engine.process import tree
from engine.process.child import _Host
from engine.process.host import _Channel, _report


async def read_all(parent: _Host) -> None:
    await parent._read_to_end()


def parent_of(control: bytes, log: bytes) -> _Host:
    """Return a parent whose host has ended and has written this."""
    log_pipe, log_end = os.pipe()
    os.set_blocking(log_pipe, False)
    os.write(log_end, log)
    os.close(log_end)
    stdout = asyncio.StreamReader()
    stdout.feed_data(control)
    stdout.feed_eof()
    process: Any = SimpleNamespace(stdout=stdout)
    return _Host("engine", process, log_pipe, "", 0.0, lambda: None, again=False)


async def test_in_json_logs_every_line_is_an_object(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logs, "_options", logs.LogOptions(form="json"))
    lines = ['{"level": "info"}', "{not JSON}", "{", "[1]", "", "plain", '{"a": 1} {"b": 2}', '{"last": []}']
    with caplog.at_level(logging.WARNING, "engine.process.output"):
        await read_all(parent_of(b"", "\n".join(lines).encode()))
    assert capsys.readouterr().err == '{"level": "info"}\n{"last": []}\n'
    assert [record.getMessage() for record in caplog.records] == [
        "{not JSON}", "{", "[1]", "plain", '{"a": 1} {"b": 2}',
    ]  # fmt: skip


async def test_a_long_reason_reaches_the_parent_cut() -> None:
    read, write = os.pipe()
    with os.fdopen(write, "w") as output:
        _report(_Channel(0, output), ValueError(), "no such thing\n" + 5000 * "é")
    line = os.read(read, 1 << 20)
    os.close(read)
    host = parent_of(line, b"")
    await read_all(host)
    assert host._failure.startswith("no such thing éé") and len(line) <= 4096


def test_a_reason_that_nobody_reads_does_not_fail() -> None:
    read, write = os.pipe()
    os.set_blocking(write, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(write, b"beat\n")
    with os.fdopen(write, "w") as output:
        _report(_Channel(0, output), ValueError(), "full")
        os.close(read)
        _report(_Channel(0, output), ValueError(), "closed")


def test_processes_that_may_not_be_killed_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int, signum: int) -> None:
        raise PermissionError

    monkeypatch.setattr(tree, "_pids", lambda: iter([os.getpid() + 1]))
    monkeypatch.setattr(tree, "_mark", lambda pid: "mark")
    monkeypatch.setattr(os, "kill", refuse)
    assert tree.kill("mark") == [os.getpid() + 1]
