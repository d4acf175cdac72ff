"""Many large images and decompression bombs at once.

The server's event loop stays free, its memory bounded, and clients that sent good images are answered.
"""

import json
import math
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from tests.support.media import data_url, png
from tests.support.pictures import memory
from tests.support.servers import ROOT, ServerProcess, serving

pytestmark = pytest.mark.timeout(120)
SECONDS, CLIENTS, IMAGES, IMAGE_BYTES = 5.0, 3, 20, 1_000_000
HEADERS = {"content-type": "application/json"}


def chat(*urls: str) -> bytes:
    content = [{"type": "text", "text": "hello"}, *({"type": "image_url", "image_url": {"url": url}} for url in urls)]
    return json.dumps({"messages": [{"role": "user", "content": content}], "max_tokens": 4}).encode()


def good() -> bytes:
    return chat(*(data_url(png(64, 64) + os.urandom(IMAGE_BYTES)) for _ in range(IMAGES)))


BOMBS = [
    chat(data_url(png(30_000, 30_000, 1000))),
    chat(data_url(png(64, 64)), data_url(png(60_000, 60_000, IMAGE_BYTES))),
]


@contextmanager
def watched(server: ServerProcess) -> Iterator[list[float]]:
    """Empty at first; afterwards the two figures of the watcher."""
    command = [
        sys.executable,
        str(ROOT / "tests/support/loop_watcher.py"),
        *server.url.removeprefix("http://").split(":"),
    ]
    figures: list[float] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield figures
        figures += map(float, process.communicate(timeout=20)[0].split())


def lags(server: ServerProcess) -> dict[float, float]:
    """How often the event loop was late by no more than so many seconds."""
    page = httpx.get(f"{server.url}/metrics").text
    return {
        float(bound): float(count)
        for bound, count in re.findall(r'trellis_event_loop_lag_seconds_bucket\{le="(.+)"\} (\S+)', page)
    }


def round_of(
    server: ServerProcess, bodies: list[bytes], codes: Counter[tuple[str, int]], sizes: list[int]
) -> tuple[float, float, float]:
    """Measure while all clients send their images.

    Returns the 99th percentiles of the lag of the server's loop, of the lag of a loop like it, and of the time of an
    answer.
    """
    before = lags(server)
    end = time.monotonic() + SECONDS

    def send(place: int) -> None:
        with httpx.Client(timeout=60, base_url=server.url, headers=HEADERS) as http:
            while time.monotonic() < end:
                for kind, body in (("good", bodies[place]), ("bomb", BOMBS[place % 2])):
                    codes[kind, http.post("/v1/chat/completions", content=body).status_code] += 1

    def weigh() -> None:
        while time.monotonic() < end:
            sizes.append(memory(server))
            time.sleep(0.1)

    with watched(server) as figures, ThreadPoolExecutor(CLIENTS + 1) as threads:
        for done in [threads.submit(weigh), *(threads.submit(send, place) for place in range(CLIENTS))]:
            done.result()
    counts = {bound: count - before.get(bound, 0) for bound, count in lags(server).items()}
    alike, answer = figures
    return min(bound for bound, count in counts.items() if count >= 0.99 * counts[math.inf]), alike, answer


def quick(lag: float, alike: float, answer: float) -> bool:
    return lag <= max(0.02, 2 * alike) and answer <= 0.02 + 2 * alike


def test_the_event_loop_is_free_while_images_and_bombs_come_in() -> None:
    """The loop is late by more than 20 ms at most once in 100 times.

    The best of six runs counts: a busy machine delays any loop.
    """
    bodies = [good() for _ in range(CLIENTS)]
    codes: Counter[tuple[str, int]] = Counter()
    sizes: list[int] = []
    rounds: list[tuple[float, float, float]] = []
    with serving() as server:
        httpx.post(
            f"{server.url}/v1/chat/completions", content=bodies[0], headers=HEADERS, timeout=20
        )  # what is done but once is done
        while not rounds or (len(rounds) < 6 and not quick(*rounds[-1])):
            rounds.append(round_of(server, bodies, codes, sizes))
    assert quick(*rounds[-1]), rounds
    assert set(codes) == {("good", 200), ("bomb", 400)} and min(codes.values()) >= CLIENTS, codes
    assert max(sizes) - sizes[0] < CLIENTS * 4 * len(bodies[0]), [size >> 20 for size in sizes]
