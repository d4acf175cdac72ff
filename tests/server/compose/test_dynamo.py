"""How a replica joins a Dynamo graph, as far as it needs no package of Dynamo's."""

import asyncio
import os
import sys
from typing import Any

import pytest

import routers.dynamo
from engine.errors import EngineFailure
from server import cli
from server.compose import dynamo
from server.settings import Settings


async def test_etcd_may_start_later(monkeypatch: pytest.MonkeyPatch, unused_tcp_port: int) -> None:
    monkeypatch.setattr(dynamo, "_CONNECT_SECONDS", 0.05)
    waiting = asyncio.create_task(dynamo.wait_for_etcd((f"http://127.0.0.1:{unused_tcp_port}",)))
    await asyncio.sleep(0.02)
    assert not waiting.done()

    async def close(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    async with await asyncio.start_server(close, "127.0.0.1", unused_tcp_port):
        await asyncio.wait_for(waiting, 10)


async def test_without_etcd_the_start_fails_with_the_cure(unused_tcp_port: int) -> None:
    with pytest.raises(EngineFailure, match=f"127.0.0.1:{unused_tcp_port}: set ETCD_ENDPOINTS"):
        await dynamo.wait_for_etcd((f"127.0.0.1:{unused_tcp_port}",), seconds=0.01)


def test_without_the_package_the_start_fails_with_the_cure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("DYN_LOG", "DYN_LOGGING_JSONL", "ETCD_ENDPOINTS"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(cli, "run", lambda *_: pytest.fail("the server starts"))
    monkeypatch.setitem(sys.modules, "routers.dynamo.worker", None)  # as if what it imports were missing
    monkeypatch.delattr(routers.dynamo, "worker", raising=False)
    assert cli.main(["serve", "--engine", "fake", "--dynamo", "true"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --dynamo (DYNAMO): needs Dynamo's runtime (pip install 'trellis[dynamo]'")


def test_the_runtime_gets_the_etcd_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("DYN_LOG", "DYN_LOGGING_JSONL"):
        monkeypatch.setenv(name, "")
    monkeypatch.setenv("ETCD_ENDPOINTS", "http://of-another-service:2379")
    monkeypatch.setattr(cli, "run", lambda *_: 0)
    monkeypatch.setitem(sys.modules, "routers.dynamo.worker", routers.dynamo)
    assert cli.main(["serve", "--engine", "fake", "--dynamo", "true", "--dynamo-etcd", "http://mine:2379"]) == 0
    assert os.environ["ETCD_ENDPOINTS"] == "http://mine:2379"


@pytest.mark.parametrize(
    ("variable", "value", "setting"),
    [
        ("DYN_NAMESPACE", "prod", "dynamo_namespace"),
        ("DYN_DISCOVERY_BACKEND", "kubernetes", "dynamo_discovery"),
        ("DYN_REQUEST_PLANE", "nats", "dynamo_request_plane"),
        ("DYN_EVENT_PLANE", "nats", "dynamo_event_plane"),
        ("DYN_TOOL_CALL_PARSER", "hermes", "dynamo_tool_parser"),
        ("DYN_REASONING_PARSER", "qwen3", "dynamo_reasoning_parser"),
        ("DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", 2.5, "dynamo_drain_seconds"),
        ("ETCD_ENDPOINTS", ("http://a:2379", "http://b:2379"), "dynamo_etcd"),
    ],
)
def test_variables_of_a_dynamo_deployment_are_read(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: Any, setting: str
) -> None:
    monkeypatch.setenv(variable, ",".join(value) if isinstance(value, tuple) else str(value))
    assert getattr(Settings(), setting) == value
