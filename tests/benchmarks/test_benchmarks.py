"""The load client's counts, percentiles and errors, with every framing of answers."""

import asyncio
import json
import math
import random
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.metrics import histogram, percentile_between
from benchmarks.report import Report, ratio
from benchmarks.servers import Server, Spec, fake, serving
from server.bench.client import LoadRun, Target, fit, fit_prompts, measure, run
from server.bench.prompts import WORDS, PromptMaker
from server.bench.summary import Summary, percentile

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
ROLE = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}
TEXT = {"choices": [{"index": 0, "delta": {"content": "a"}}]}
USAGE = {
    "choices": [],
    "usage": {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 2}},
}


def events(*chunks: dict[str, object], newline: bytes = b"\n", done: bool = True) -> bytes:
    lines = [b"data: " + json.dumps(chunk).encode() for chunk in chunks] + ([b"data: [DONE]"] if done else [])
    return b"".join(line + newline * 2 for line in lines)


def chunked(body: bytes, cuts: list[int]) -> bytes:
    """The body in HTTP chunks, cut at these places, and the end of the response."""
    places = [0, *sorted({cut % (len(body) + 1) for cut in cuts} - {0, len(body)}), len(body)]
    pieces = [body[start:end] for start, end in pairwise(places)]
    return b"".join(b"%x\r\n%s\r\n" % (len(piece), piece) for piece in pieces if piece) + b"0\r\n\r\n"


@asynccontextmanager
async def scripted(answer: bytes, *, close: bool = False) -> AsyncIterator[Target]:
    """A server that answers every request with the same bytes, and may then close the connection."""

    handling: set[asyncio.Task[object]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        handling.add(task)
        while head := await reader.read(65536):
            assert head.startswith(b"POST /v1/")
            writer.write(answer)
            await writer.drain()
            if close:
                break
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield Target(f"http://127.0.0.1:{port}/v1", "m")
    if handling:  # until they have seen that the client has hung up
        await asyncio.wait(handling)


async def measured(answer: bytes, *, requests: int = 2, timeout: float = 20, close: bool = False) -> Summary:
    async with scripted(answer, close=close) as target:
        return await measure(target, LoadRun(2, requests, 5, 3, timeout), PromptMaker(), "seed")


@settings(max_examples=40, deadline=None)
@given(
    cuts=st.lists(st.integers(0, 10_000), max_size=12),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    texts=st.integers(1, 5),
)
def test_counts_events_however_they_are_cut(cuts: list[int], newline: bytes, texts: int) -> None:
    body = b": ping" + newline * 2 + events(ROLE, *[TEXT] * texts, USAGE, newline=newline)
    summary = asyncio.run(measured(HEAD + chunked(body, cuts), requests=4))
    assert (summary.errors, summary.first_error) == (0, "")
    assert summary.chunks == 4 * (texts + 2)
    assert (summary.completion_tokens, summary.prompt_tokens, summary.cached_tokens) == (12, 5, 8)
    assert 0 < summary.ttft_p50 <= summary.ttft_p99
    assert summary.tokens_per_second == pytest.approx(12 / summary.seconds)


async def test_usage_may_come_with_the_last_choice_and_without_done() -> None:
    last = {
        "choices": [{"index": 0, "delta": {}, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 5, "completion_tokens": 3},
    }
    summary = await measured(HEAD + chunked(events(ROLE, TEXT, last, done=False), []))
    assert (summary.errors, summary.completion_tokens) == (0, 6)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 4\r\n\r\nbusy", "HTTP 429: busy"),
        (HEAD + chunked(events(TEXT, {"error": {"message": "lost"}}, done=False), []), '"lost"'),
        (HEAD + chunked(events(TEXT), []), "without usage"),
        (HEAD + chunked(b"", []), "without usage"),
        (
            HEAD + chunked(events(TEXT, {"usage": {"prompt_tokens": 5, "completion_tokens": 2}}), []),
            "2 tokens came instead of 3",
        ),
        (b"nonsense\r\n\r\n", "malformed HTTP"),
    ],
)
async def test_failures_are_counted_and_the_first_is_shown(answer: bytes, message: str) -> None:
    summary = await measured(answer)
    assert (summary.requests, summary.errors, summary.completion_tokens) == (2, 2, 0)
    assert message in summary.first_error


async def test_a_lost_connection_is_an_error_and_the_next_request_connects_again() -> None:
    summary = await measured(HEAD + b"10\r\n", requests=4, close=True)
    assert (summary.errors, summary.first_error) == (4, "the connection was lost")


async def test_a_stream_that_never_ends_is_given_up() -> None:
    summary = await measured(HEAD, timeout=0.1)
    assert (summary.errors, summary.first_error) == (2, "no end within 0.1 s")


async def test_a_server_that_is_not_running_is_an_error() -> None:
    async with scripted(b"") as target:
        pass
    summary = await measure(target, LoadRun(1, 2, 5, 3), PromptMaker(), "seed")
    assert summary.errors == 2
    assert "cannot connect" in summary.first_error
    with pytest.raises(RuntimeError, match="cannot connect"):
        await fit_prompts(target)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0.1, 100))
def test_percentile_is_the_smallest_value_that_covers_its_share(values: list[float], percent: float) -> None:
    found = percentile(values, percent)
    assert found in values
    assert sum(value <= found for value in values) >= len(values) * percent / 100
    assert sum(value < found for value in values) < len(values) * percent / 100


@given(st.integers(0, 60), st.sampled_from([1, 2, 5]), st.integers(100, 2000))
def test_prompts_have_the_tokens_asked_for(overhead: int, per_word: int, tokens: int) -> None:
    prompts = PromptMaker.fit(((8, overhead + 8 * per_word), (72, overhead + 72 * per_word)))
    text = prompts.text(tokens, random.Random(0))
    assert abs(overhead + len(text.split()) * per_word - tokens) <= per_word
    assert {len(word) for word in WORDS} == {4}


def test_histograms_are_read_between_two_scrapes() -> None:
    page = (
        'lag_bucket{{le="0.001",p="1"}} {}\nlag_bucket{{le="0.01",p="1"}} {}\n'
        'lag_bucket{{p="1",le="+Inf"}} {}\nlag_bucket{{le="+Inf"}} 0\n'
    )
    before, after = histogram(page.format(5, 7, 7), "lag"), histogram(page.format(5, 106, 107), "lag")
    assert after == {0.001: 5.0, 0.01: 106.0, math.inf: 107.0}
    assert percentile_between(before, after, 99) == 0.01
    assert percentile_between(before, after, 100) == math.inf
    assert math.isnan(percentile_between(after, after, 99))
    assert histogram("", "lag") == {}


def summary_of(tokens_per_second: float) -> Summary:
    return Summary(1.0, 2, 0, "", 40.0, 0, 10, tokens_per_second, 10, 10.0, 1.0, 2.0, 3.0, 4.0)


def test_the_report_sets_servers_side_by_side(tmp_path: Path) -> None:
    fast, slow = (
        [summary_of(20.0), summary_of(90.0), summary_of(30.0)],
        [summary_of(10.0), summary_of(10.0), summary_of(10.0)],
    )
    assert ratio(fast, slow) == 3.0
    assert ratio(fast, [summary_of(0.0)] * 3) == math.inf
    report = Report("test", {"seed": "1"}, cells={"4:40:128": {"ours": fast, "peer": slow}}, others=[0.5])
    page = report.write(tmp_path)
    assert "|       4 |     40 |    128 |       30.0 |" in page.read_text()
    assert "3.00" in page.read_text()
    assert (
        json.loads(page.with_suffix(".json").read_text())["cells"]["4:40:128"]["peer"][0]["tokens_per_second"] == 10.0
    )


def test_a_server_that_does_not_start_tells_why_and_leaves_nothing() -> None:
    spec = Spec("broken", (sys.executable, "-c", "print('no such model'); raise SystemExit(3)"), "/health")
    with pytest.raises(RuntimeError, match="no such model"), serving(spec):
        pytest.fail("it cannot have started")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving(fake(2.0, engine_process=False)) as running:
        yield running
    assert not psutil.pid_exists(running.process.pid)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_against_the_real_server(server: Server, endpoint: str) -> None:
    target = Target(f"{server.url}/v1", server.target.model, endpoint=endpoint)  # type: ignore[arg-type]
    load = LoadRun(8, 24, 400, 16)
    summary = run(target, load, fit(target), "seed")
    assert (summary.errors, summary.first_error) == (0, "")
    assert (summary.requests, summary.completion_tokens) == (24, 24 * 16)
    assert summary.prompt_tokens == pytest.approx(400, rel=0.1)
    assert 24 < summary.chunks <= 24 * 18
    assert summary.gap_p99 >= 2.0
    assert summary.seconds >= 3 * 15 * 0.002
    server.note_memory()
    assert server.memory_mb > 10
    assert server.answer_seconds > server.ready_seconds > 0


def test_the_real_server_refuses(server: Server) -> None:
    target = Target(f"{server.url}/v1", server.target.model, extra={"temperature": 99})
    summary = run(target, LoadRun(2, 4, 40, 4), PromptMaker(), "seed")
    assert summary.errors == 4
    assert summary.first_error.startswith("HTTP 400")


def test_bench_measures_http_alone(tmp_path: Path) -> None:
    options = [
        "--servers",
        "fake",
        "--fake-streams",
        "16",
        "--fake-rounds",
        "2",
        "--fake-delay-ms",
        "1",
        "--label",
        "test",
        "--output",
        str(tmp_path),
    ]
    run_ = subprocess.run([sys.executable, "-m", "benchmarks", *options], capture_output=True, text=True, check=False)
    assert run_.returncode == 0, run_.stderr
    (path,) = tmp_path.glob("*-test.json")
    found = json.loads(path.read_text())["http"]
    assert found["errors"] == "0"
    assert found["chunks/s"] > 100
    assert 0 < found["event-loop lag p99, ms (bucket's upper bound)"] < math.inf


def test_bench_told_to_stop_leaves_no_server(tmp_path: Path) -> None:
    options = ["--servers", "fake", "--fake-streams", "4", "--fake-delay-ms", "1000", "--output", str(tmp_path)]
    bench = subprocess.Popen(
        [sys.executable, "-m", "benchmarks", *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    watched = psutil.Process(bench.pid)
    while not (servers := [child for child in watched.children(recursive=True) if listens(child)]):
        assert bench.poll() is None
        time.sleep(0.1)
    bench.terminate()
    assert bench.wait(60) == 143
    _, left = psutil.wait_procs(servers, timeout=20)
    assert not left


def listens(process: psutil.Process) -> bool:
    try:
        return any(connection.status == psutil.CONN_LISTEN for connection in process.net_connections("tcp"))
    except psutil.NoSuchProcess:  # git, which has told the commit
        return False
