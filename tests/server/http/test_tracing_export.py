"""The way of spans to a collector: it costs no request anything, and a server neither waits for it at its end nor needs
it to start.
"""

import asyncio
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import httpx
import pytest

from engine.kit.logs import JsonFormatter
from server import cli
from server.http import tracing
from tests.support.otel import Collector, collector
from tests.support.servers import CHAT, application, serving
from tests.support.waiting import slowness

CHATS = "/v1/chat/completions"


@pytest.fixture
def spans() -> Iterator[Collector]:
    with collector() as receiver:
        yield receiver


def test_a_dead_collector_holds_up_neither_requests_nor_the_end() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        endpoint = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with serving("--otel-endpoint", endpoint) as process:
            with httpx.Client(base_url=process.url) as client:
                for _ in range(50):
                    assert client.post(CHATS, json=CHAT).status_code == 200
            time.sleep(0.7)  # the first batch is on its way, in vain
            began = time.monotonic()
            process.process.terminate()
            assert process.wait() == 0 and time.monotonic() - began < 3 * slowness()
    assert "Traceback" not in process.log and "opentelemetry" not in process.log


async def test_a_slow_collector_holds_up_nobody_at_the_end(spans: Collector, caplog: pytest.LogCaptureFixture) -> None:
    """What it says afterwards is not news: its spans are already called lost."""
    slow = slowness()
    spans.status, spans.delay = 400, 4 * slow
    async with application(otel_endpoint=spans.url) as (client, _):
        await client.post(CHATS, json=CHAT)
        await asyncio.sleep(0.6)
        began = time.monotonic()
    assert time.monotonic() - began < 3.5 * slow
    for thread in [thread for thread in threading.enumerate() if thread.name == "traces-closing"]:
        await asyncio.to_thread(thread.join)
    said = [record.message for record in caplog.records if record.name == "server.http.tracing"]
    assert said == ["traces that the collector has not taken are lost"]


async def test_spans_that_are_not_exported_are_counted(
    spans: Collector, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of few spans that may wait, while the collector refuses."""
    monkeypatch.setattr(tracing, "MAX_WAITING", 70)
    monkeypatch.setattr(tracing, "_BATCH", 64)
    spans.status, spans.delay = 400, 0.2
    with caplog.at_level(logging.WARNING, "server.http.tracing"):
        async with application(otel_endpoint=spans.url) as (client, state):
            await asyncio.gather(*(client.post(CHATS, json=CHAT) for _ in range(40)))
            counts: dict[str, float] = {}
            async with asyncio.timeout(20):
                while sum(counts.values()) < 200:
                    await asyncio.sleep(0.02)
                    lines = [
                        line.split()
                        for line in state["render_metrics"]().decode().splitlines()
                        if line.startswith("trellis_trace_spans_total")
                    ]
                    counts = {name.split('"')[1]: float(value) for name, value in lines}
            assert counts["dropped"] >= 200 - 70 - 64 and counts["failed"] >= 64 and counts["exported"] == 0
            assert sum(counts.values()) == 200, "of each request five"
            spans.status, spans.delay = 200, 0
            await client.post(CHATS, json=CHAT)
            await asyncio.to_thread(spans.one, f"POST {CHATS}")
    assert [record.message for record in caplog.records] == ["the collector of traces takes none"]


def test_without_an_endpoint_nothing_is_loaded() -> None:
    code = "import sys; from server.app import create_app; from server.settings import Settings;"
    code += "create_app(Settings(engine='fake'));"
    code += "loaded = [name for name in sys.modules if name.startswith(('opentelemetry.sdk', 'server.http.tracing'))];"
    code += "assert not loaded, loaded"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_package_the_start_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    monkeypatch.delitem(sys.modules, "server.http.tracing", raising=False)
    monkeypatch.delattr("server.http.tracing", raising=False)
    assert cli.main(["--engine", "fake", "--otel-endpoint", "http://127.0.0.1:9"]) == 2
    assert "trellis[otel]" in capsys.readouterr().err


async def test_log_lines_for_machines_name_the_trace(spans: Collector, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[dict[str, str]] = []

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(json.loads(self.format(record)))

    handler, access = Lines(), logging.getLogger("access")
    handler.setFormatter(JsonFormatter())
    caplog.set_level(logging.INFO, "access")
    access.addHandler(handler)
    try:
        async with application(otel_endpoint=spans.url, access_log=True) as (client, _):
            await client.post(CHATS, json=CHAT)
            await client.get("/version")
    finally:
        access.removeHandler(handler)
    span = spans.one(f"POST {CHATS}")
    assert [(line.get("trace_id"), line.get("span_id")) for line in lines[-2:]] == [(span.trace, span.id), (None, None)]
