"""A collector of traces: takes OTLP over HTTP, and reads the protobuf with OpenTelemetry's own definitions."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1 import trace_pb2


@dataclass(frozen=True)
class Span:
    """As it came in; ids in hexadecimal, times in seconds."""

    name: str
    trace: str
    id: str
    parent: str
    kind: str
    start: float
    end: float
    failed: bool
    attributes: dict[str, Any]
    of: dict[str, Any]
    """Attributes of the process that it is from."""
    raw: bytes


class Collector(ThreadingHTTPServer):
    """Listens on `url`; `status` is what it answers, after `delay` seconds."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans: list[Span] = []
        self.paths: set[str] = set()
        self.status = 200
        self.delay = 0.0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def named(self, name: str, role: str | None = None) -> list[Span]:
        return [span for span in list(self.spans) if span.name == name and role in (None, span.of["trellis.role"])]

    def one(self, name: str, role: str | None = None) -> Span:
        """The only span of the name. Waits for it."""
        self.wait(lambda: self.named(name, role))
        (span,) = self.named(name, role)
        return span

    def wait(self, condition: Callable[[], object], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, [(span.of.get("trellis.role"), span.name) for span in self.spans]
            time.sleep(0.01)


class _Handler(BaseHTTPRequestHandler):
    server: Collector
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        time.sleep(self.server.delay)
        self.server.paths.add(self.path)
        if self.server.status == 200:
            self.server.spans += _spans(ExportTraceServiceRequest.FromString(body))
        self.send_response(self.server.status)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def _spans(request: ExportTraceServiceRequest) -> Iterator[Span]:
    for resource in request.resource_spans:
        of = _attributes(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield Span(
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    kind=trace_pb2.Span.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
                    start=span.start_time_unix_nano / 1e9,
                    end=span.end_time_unix_nano / 1e9,
                    failed=span.status.code == trace_pb2.Status.STATUS_CODE_ERROR,
                    attributes=_attributes(span.attributes),
                    of=of,
                    raw=span.SerializeToString(),
                )


def _attributes(pairs: Any) -> dict[str, Any]:
    found: list[KeyValue] = list(pairs)
    return {pair.key: _value(pair.value) for pair in found}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    assert kind is not None
    return [_value(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)


@contextmanager
def collector() -> Iterator[Collector]:
    serving = Collector()
    thread = threading.Thread(target=serving.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield serving
    finally:
        serving.shutdown()
        serving.server_close()
        thread.join()
