"""Traces by OpenTelemetry: a server span for every POST, spans of its stages below it (`engine/trace.py`), and the
export to a collector. Imported only where OTEL_ENDPOINT is set.

Spans wait in a bounded queue for a thread that sends them; those that do not fit, or that the collector refuses, are
counted and dropped. Requests never wait for the export, and a shutdown waits for `CLOSE_SECONDS` at most. The library's
own spans are not used, since they take four times as long on the event loop; its queue and its exporter are.
"""

import logging
import threading
import time
from collections.abc import Sequence
from urllib.parse import urlsplit

from fastapi.routing import APIRoute
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import trace
from server import __version__
from server.compose.model import served_name
from server.roles import role_of
from server.settings import Settings

MAX_WAITING = 8192
"""Maximum number of spans that wait for the collector: those of about a thousand requests."""
CLOSE_SECONDS = 1.0
"""Maximum seconds that a shutdown waits for spans to be sent."""
_BATCH, _PAUSE_MS = 256, 500
"""Maximum number of spans in a message, and the pause in milliseconds before a smaller message is sent."""
_SEND_SECONDS = 5.0
_PATH = "/v1/traces"
_SCOPE = InstrumentationScope("trellis", __version__)

log = logging.getLogger(__name__)
_w3c = TraceContextTextMapPropagator()
_ids = RandomIdGenerator()
_UNSET, _ERROR = Status(StatusCode.UNSET), Status(StatusCode.ERROR)


class Tracing:
    """Makes the spans of one API process and exports them. Close it once."""

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        about = {
            "service.name": settings.otel_service_name,
            "service.version": __version__,
            "trellis.role": role_of(settings).name,
            "trellis.engine": settings.engine,
            "gen_ai.request.model": served_name(settings),
        }
        self.resource = _Process(Resource.create(about).attributes)
        # While the collector is away the library would log four lines a second.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
        self._exporter = _Exporter(OTLPSpanExporter(_url(settings.otel_endpoint), timeout=_SEND_SECONDS), registry)
        self._batches = BatchSpanProcessor(self._exporter, MAX_WAITING, _PAUSE_MS, _BATCH)
        self._taken_in = 0
        self._sampler = TraceIdRatioBased(settings.otel_sample_ratio)

    def request(self, name: str, headers: Headers) -> "_Recorded | _Unsampled":
        """Return the span of an incoming request, part of the client's trace if it has one."""
        given = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        parent = get_current_span(_w3c.extract(given, Context())).get_span_context() if given else None
        if parent is not None and parent.is_valid:
            if not parent.trace_flags.sampled:
                return _Unsampled(_headers(parent))
            return _Recorded(self, name, SpanKind.SERVER, _below(parent), parent)
        trace_id = _ids.generate_trace_id()
        sampled = self._sampler.should_sample(None, trace_id, name).decision.is_sampled()  # type: ignore[no-untyped-call]
        flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
        context = SpanContext(trace_id, _ids.generate_span_id(), False, flags)
        return _Recorded(self, name, SpanKind.SERVER, context) if sampled else _Unsampled(_headers(context))

    def middleware(self, app: ASGIApp) -> "TracingMiddleware":
        return TracingMiddleware(app, self)

    def export(self, span: ReadableSpan) -> None:
        """Have a span that has ended sent; drop it if `MAX_WAITING` spans wait."""
        if self._taken_in - self._exporter.done < MAX_WAITING:
            self._taken_in += 1
            self._batches.on_end(span)
        else:
            self._exporter.spans.labels("dropped").inc()

    def close(self) -> None:
        """Send the spans that wait. Takes up to `CLOSE_SECONDS`."""
        closing = threading.Thread(target=self._batches.shutdown, name="traces-closing", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.warning("traces that the collector has not taken are lost")
            self._exporter.shutdown()


class _Process(Resource):
    """The resource of all spans. The exporter hashes it for each one, and the library's hash makes JSON every time."""

    __hash__ = object.__hash__


class TracingMiddleware:
    """Opens the server span of each POST. GET requests (health, metrics, probes) have no trace."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        span = self._tracing.request("POST", Headers(scope=scope))

        async def send_with_status(message: Message) -> None:
            if message["type"] == "http.response.start":
                span.set({"http.response.status_code": message["status"]})
            await send(message)

        token = trace.current.set(span)
        try:
            await self._app(scope, receive, send_with_status)
        except Exception as error:
            span.fail(type(error).__name__)
            raise
        finally:
            trace.current.reset(token)
            _describe(span, scope)
            span.end()


def _describe(span: "_Recorded | _Unsampled", scope: Scope) -> None:
    """Describe a span by the route's template: the path itself is the client's choice."""
    route = scope.get("route")
    if isinstance(route, APIRoute):
        span.rename(f"POST {route.path_format}")
        span.set({"http.route": route.path_format})
    span.set(
        {
            "http.request.method": "POST",
            "url.scheme": scope["scheme"],
            "trellis.request_id": scope["state"]["request_id"],
        }
    )


class _Recorded:
    """An `engine.trace.Span` that goes to the collector."""

    __slots__ = ("_attributes", "_context", "_kind", "_name", "_parent", "_start", "_status", "_tracing")

    def __init__(
        self, tracing: Tracing, name: str, kind: SpanKind, context: SpanContext, parent: SpanContext | None = None
    ) -> None:
        self._tracing = tracing
        self._name = name
        self._kind = kind
        self._context = context
        self._parent = parent
        self._attributes: dict[str, trace.Value] = {}
        self._status = _UNSET
        self._start = time.time_ns()

    @property
    def headers(self) -> dict[str, str]:
        return _headers(self._context)

    def child(
        self, name: str, attributes: trace.Attributes | None = None, *, client: bool = False, start: int | None = None
    ) -> trace.Span:
        kind = SpanKind.CLIENT if client else SpanKind.INTERNAL
        child = _Recorded(self._tracing, name, kind, _below(self._context), self._context)
        child._attributes.update(attributes or {})
        child._start = start if start is not None else child._start
        return child

    def rename(self, name: str) -> None:
        self._name = name

    def set(self, attributes: trace.Attributes) -> None:
        self._attributes.update(attributes)

    def fail(self, code: str, *, ours: bool = True) -> None:
        self._attributes["error.type"] = code
        if ours:
            self._status = _ERROR

    def end(self, at: int | None = None) -> None:
        attributes = self._attributes
        self._attributes = {}  # the exporting thread reads the old ones from here on
        span = ReadableSpan(
            name=self._name,
            context=self._context,
            parent=self._parent,
            resource=self._tracing.resource,
            attributes=attributes,
            kind=self._kind,
            status=self._status,
            start_time=self._start,
            end_time=max(self._start, time.time_ns() if at is None else at),  # the clock may have been set back
            instrumentation_scope=_SCOPE,
        )
        self._tracing.export(span)


class _Unsampled:
    """An `engine.trace.Span` that is not recorded; only its headers are passed on."""

    __slots__ = ("headers",)

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers

    def child(
        self, name: str, attributes: trace.Attributes | None = None, *, client: bool = False, start: int | None = None
    ) -> trace.Span:
        return self

    def rename(self, name: str) -> None:
        pass

    def set(self, attributes: trace.Attributes) -> None:
        pass

    def fail(self, code: str, *, ours: bool = True) -> None:
        pass

    def end(self, at: int | None = None) -> None:
        pass


def _below(parent: SpanContext) -> SpanContext:
    """Return the context of a new span of the same trace."""
    return SpanContext(parent.trace_id, _ids.generate_span_id(), False, parent.trace_flags, parent.trace_state)


def _headers(context: SpanContext) -> dict[str, str]:
    headers = {"traceparent": f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"}
    return headers | {"tracestate": context.trace_state.to_header()} if context.trace_state else headers


def _url(endpoint: str) -> str:
    """Return the URL of traces: the endpoint, with OTLP's path unless it has a path of its own."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH


class _Exporter(SpanExporter):
    """Counts the outcomes of spans, and logs when the collector stops and starts answering."""

    def __init__(self, otlp: OTLPSpanExporter, registry: CollectorRegistry) -> None:
        self.done = 0
        """Spans that have left the queue."""
        self.spans = Counter(
            "trellis_trace_spans",
            "Spans by what became of them: exported, failed (the collector did not take them) or dropped "
            "(too many waited)",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("exported", "failed", "dropped"):
            self.spans.labels(outcome)
        self._otlp = otlp
        self._answers = True
        self._closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._otlp.export(spans)
        answers = result is SpanExportResult.SUCCESS
        self.done += len(spans)
        self.spans.labels("exported" if answers else "failed").inc(len(spans))
        if answers != self._answers and not self._closed:  # a shutdown has already logged the loss
            self._answers = answers
            if answers:
                log.info("the collector of traces answers")
            else:
                log.warning("the collector of traces takes none")
        return result

    def shutdown(self) -> None:
        self._closed = True
        self._otlp.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True
