"""Traces by OpenTelemetry: a server span for every request that is posted, spans of its stages below it (`engine/trace.py`), and their way
to a collector. Imported only where OTEL_ENDPOINT is set.

Spans wait in a bounded queue for a thread that sends them; what does not fit, and what the collector does not take, is counted and gone.
Requests never wait for any of it, and a shutdown only so long.
"""

import logging
import threading
from collections.abc import Sequence
from urllib.parse import urlsplit

from fastapi.routing import APIRoute
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from prometheus_client import CollectorRegistry, Counter
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine import trace
from server import __version__
from server.compose import served_name
from server.settings import Settings

MAX_WAITING = 8192
"""Spans that may wait for the collector: of about a thousand requests."""
CLOSE_SECONDS = 1.0
"""How long the end of the server may be put off by what still waits."""
_BATCH = 64
"""Spans in one message. Encoding them holds the interpreter's lock, for about a millisecond."""
_PAUSE_MS = 500
_SEND_SECONDS = 5.0
_PATH = "/v1/traces"

log = logging.getLogger(__name__)
_w3c = TraceContextTextMapPropagator()


class Tracing:
    """The tracer of one API process, and the way of its spans to the collector. Close it once."""

    def __init__(self, settings: Settings, registry: CollectorRegistry) -> None:
        resource = {
            "service.name": settings.otel_service_name,
            "service.version": __version__,
            "trellis.role": settings.disaggregation_mode,
            "trellis.engine": settings.engine,
            "gen_ai.request.model": served_name(settings),
        }
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # of a collector that is away it would say four lines a second
        self._exporter = _Exporter(OTLPSpanExporter(_url(settings.otel_endpoint), timeout=_SEND_SECONDS), registry)
        self._provider = TracerProvider(
            ParentBased(TraceIdRatioBased(settings.otel_sample_ratio)), Resource.create(resource), shutdown_on_exit=False
        )
        self._provider.add_span_processor(_Queue(self._exporter))
        self._tracer = self._provider.get_tracer("trellis", __version__)

    def request(self, name: str, headers: Headers) -> "_Recorded | _Unsampled":
        """The span of a request that comes in, part of the client's trace if it has one."""
        given = {key: headers[key] for key in ("traceparent", "tracestate") if key in headers}
        return _begin(self._tracer, name, _w3c.extract(given, Context()), SpanKind.SERVER, None, None)

    def middleware(self, app: ASGIApp) -> "TracingMiddleware":
        return TracingMiddleware(app, self)

    def close(self) -> None:
        """Send what waits. Takes up to `CLOSE_SECONDS`."""
        closing = threading.Thread(target=self._provider.shutdown, name="traces-closing", daemon=True)
        closing.start()
        closing.join(CLOSE_SECONDS)
        if closing.is_alive():
            log.warning("traces that the collector has not taken are lost")
            self._exporter.shutdown()


class TracingMiddleware:
    """The server span of each POST: all work is posted, and what is asked for by GET (health, metrics, probes) is not worth a trace."""

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
    """By the route's template: what stands in its place is the client's."""
    route = scope.get("route")
    if isinstance(route, APIRoute):
        span.rename(f"POST {route.path_format}")
        span.set({"http.route": route.path_format})
    span.set({"http.request.method": "POST", "url.scheme": scope["scheme"], "trellis.request_id": scope["state"]["request_id"]})


class _Recorded:
    """An `engine.trace.Span` that OpenTelemetry records."""

    __slots__ = ("_context", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, Context())

    @property
    def headers(self) -> dict[str, str]:
        return _headers(self._context)

    def child(self, name: str, attributes: trace.Attributes | None = None, *, client: bool = False, start: int | None = None) -> trace.Span:
        return _begin(self._tracer, name, self._context, SpanKind.CLIENT if client else SpanKind.INTERNAL, attributes, start)

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: trace.Attributes) -> None:
        self._span.set_attributes(attributes)

    def fail(self, code: str, *, ours: bool = True) -> None:
        self._span.set_attribute("error.type", code)
        if ours:
            self._span.set_status(StatusCode.ERROR)

    def end(self, at: int | None = None) -> None:
        self._span.end(at)


class _Unsampled:
    """An `engine.trace.Span` that nobody records: all that is left of it is what others are told."""

    __slots__ = ("headers",)

    def __init__(self, headers: dict[str, str]) -> None:
        self.headers = headers

    def child(self, name: str, attributes: trace.Attributes | None = None, *, client: bool = False, start: int | None = None) -> trace.Span:
        return self

    def rename(self, name: str) -> None:
        pass

    def set(self, attributes: trace.Attributes) -> None:
        pass

    def fail(self, code: str, *, ours: bool = True) -> None:
        pass

    def end(self, at: int | None = None) -> None:
        pass


def _begin(
    tracer: Tracer, name: str, context: Context, kind: SpanKind, attributes: trace.Attributes | None, start: int | None
) -> _Recorded | _Unsampled:
    span = tracer.start_span(name, context, kind, attributes, start_time=start)
    return _Recorded(tracer, span) if span.is_recording() else _Unsampled(_headers(set_span_in_context(span, Context())))


def _headers(context: Context) -> dict[str, str]:
    carrier: dict[str, str] = {}
    _w3c.inject(carrier, context)
    return carrier


def _url(endpoint: str) -> str:
    """Where traces go: the path of OTLP, unless the setting has one."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + _PATH


class _Queue(SpanProcessor):
    """What has ended and is not sent yet, within `MAX_WAITING`."""

    def __init__(self, exporter: "_Exporter") -> None:
        self._exporter = exporter
        self._batches = BatchSpanProcessor(exporter, MAX_WAITING, _PAUSE_MS, _BATCH)
        self._taken_in = 0

    def on_end(self, span: ReadableSpan) -> None:
        if self._taken_in - self._exporter.done < MAX_WAITING:
            self._taken_in += 1
            self._batches.on_end(span)
        else:
            self._exporter.spans.labels("dropped").inc()

    def shutdown(self) -> None:
        self._batches.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._batches.force_flush(timeout_millis)


class _Exporter(SpanExporter):
    """Counts what became of spans, and says when the collector has gone and when it is back."""

    def __init__(self, otlp: OTLPSpanExporter, registry: CollectorRegistry) -> None:
        self.done = 0
        """Spans that wait no more."""
        self.spans = Counter(
            "trace_spans",
            "Spans by what became of them: exported, failed (the collector did not take them) or dropped (too many waited)",
            ["outcome"],
            registry=registry,
        )
        for outcome in ("exported", "failed", "dropped"):
            self.spans.labels(outcome)
        self._otlp = otlp
        self._answers = True

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._otlp.export(spans)
        answers = result is SpanExportResult.SUCCESS
        self.done += len(spans)
        self.spans.labels("exported" if answers else "failed").inc(len(spans))
        if answers != self._answers:
            self._answers = answers
            log.log(logging.INFO if answers else logging.WARNING, "the collector of traces %s", "answers" if answers else "takes none")
        return result

    def shutdown(self) -> None:
        self._otlp.shutdown()  # type: ignore[no-untyped-call]

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True
