"""Requests that share fetches, and a responsive event loop meanwhile."""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.errors import EngineNotReady
from engine.kit.tasks import all_of
from engine.kit.work import begin_request
from engine.media import MediaInput
from multimodal.errors import InvalidMedia, MediaError
from multimodal.media.limits import MediaLimits
from multimodal.media.loader import MediaLoader
from tests.support.media import PUBLIC, data_url, image_file, ok, png, status, world
from tests.support.waiting import until

PNG = image_file()
URL = "http://images.test/a.png"


class Gate:
    """An answer that waits to be let go."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self.asked = asyncio.Event()
        self.open = asyncio.Event()
        self.gone = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.asked.set()
        opened, left = asyncio.create_task(self.open.wait()), asyncio.create_task(reader.read())
        await asyncio.wait([opened, left], return_when=asyncio.FIRST_COMPLETED)
        if left.done():
            self.gone.set()
        else:
            writer.write(self._answer)
            await writer.drain()
        opened.cancel()
        left.cancel()


async def test_concurrent_loads_share_one_fetch() -> None:
    async with world() as w:
        gate = w.server.answers["/a.png"] = Gate(ok(PNG))
        urls = [URL, "HTTP://IMAGES.TEST:80/a.png#part", "http://images.test/a.png"] * 5
        loads = [asyncio.create_task(w.loader.load(url)) for url in urls]
        await gate.asked.wait()
        loads.append(asyncio.create_task(w.loader.load(URL)))
        await asyncio.sleep(0)
        gate.open.set()
        assert {loaded.data for loaded in await asyncio.gather(*loads)} == {PNG}
        assert w.server.requests["/a.png"] == 1
        await w.loader.load(URL)
        assert w.server.requests["/a.png"] == 2, "nothing is kept"


async def test_other_urls_are_other_fetches() -> None:
    async with world() as w:
        paths = ["/a.png", "/A.png", "/a.png?", "/a.png?b", "/a%2epng"]
        w.server.answers |= dict.fromkeys(paths, ok(PNG))
        await asyncio.gather(*(w.loader.load("http://images.test" + path) for path in paths))
        assert w.server.requests == dict.fromkeys(paths, 1)


async def test_a_cancelled_waiter_leaves_the_fetch_to_the_others() -> None:
    async with world() as w:
        gate = w.server.answers["/a.png"] = Gate(ok(PNG))
        loads = [asyncio.create_task(w.loader.load(URL)) for _ in range(3)]
        await gate.asked.wait()
        for load in loads[:2]:  # the first of them began it
            load.cancel()
            with pytest.raises(asyncio.CancelledError):
                await load
        gate.open.set()
        assert (await loads[2]).data == PNG
        assert w.server.requests["/a.png"] == 1


async def test_the_last_waiter_to_go_ends_the_fetch() -> None:
    async with world() as w:
        gate = w.server.answers["/a.png"] = Gate(ok(PNG))
        loads = [asyncio.create_task(w.loader.load(URL)) for _ in range(3)]
        await gate.asked.wait()
        for load in loads:
            load.cancel()
        await asyncio.gather(*loads, return_exceptions=True)
        w.server.answers["/a.png"] = ok(PNG)
        assert (await w.loader.load(URL)).data == PNG, "a later request does not join what is being given up"
        async with asyncio.timeout(20):
            await gate.gone.wait()
        assert len(w.loader._fetches) == 0


async def test_failures_reach_every_waiter_and_are_not_cached() -> None:
    async with world() as w:
        gate = w.server.answers["/a.png"] = Gate(status(503))
        loads = [asyncio.create_task(w.loader.load(URL, f"messages.{n}")) for n in range(3)]
        await gate.asked.wait()
        gate.open.set()
        errors = await asyncio.gather(*loads, return_exceptions=True)
        assert [error.param for error in errors if isinstance(error, MediaError)] == [
            "messages.0",
            "messages.1",
            "messages.2",
        ]
        w.server.answers["/a.png"] = ok(PNG)
        assert (await w.loader.load(URL)).data == PNG
        assert w.server.requests["/a.png"] == 2


async def test_no_more_than_the_limit_are_loaded_at_once() -> None:
    async with world(concurrency=2) as w:
        w.names |= {f"{n}.test": [PUBLIC] for n in range(4)}
        gates = [Gate(ok(PNG)) for _ in range(4)]
        w.server.answers |= {f"/{n}": gate for n, gate in enumerate(gates)}
        loads = [asyncio.create_task(w.loader.load(f"http://{n}.test/{n}")) for n in range(4)]
        await gates[1].asked.wait()
        await asyncio.sleep(0.05)
        assert [gate.asked.is_set() for gate in gates] == [True, True, False, False]
        loads[0].cancel()
        await gates[2].asked.wait()
        for gate in gates:
            gate.open.set()
        assert sum(isinstance(found, MediaInput) for found in await asyncio.gather(*loads, return_exceptions=True)) == 3


async def test_closing_gives_up_what_is_under_way() -> None:
    async with world() as w:
        gate = w.server.answers["/a.png"] = Gate(ok(PNG))
        load = asyncio.create_task(w.loader.load(URL))
        await gate.asked.wait()
        await w.loader.aclose()
        with pytest.raises(EngineNotReady):
            await load
        with pytest.raises(EngineNotReady):
            await w.loader.load(data_url(PNG))


async def test_pixels_are_limited_whatever_the_way() -> None:
    async with world(max_image_pixels=64 * 48) as w:
        w.server.answers |= {"/a.png": ok(PNG), "/bomb.png": ok(png(64, 49))}
        for url in (URL, data_url(PNG)):
            assert await w.loader.load(url) == MediaInput(PNG, pixels=64 * 48)
        for url in ("http://images.test/bomb.png", data_url(png(64, 49))):
            with pytest.raises(InvalidMedia, match="64 x 49 pixels"):
                await w.loader.load(url)


@pytest.fixture
def file_server(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    """The address of a server in a process of its own, and its folder."""
    command = [sys.executable, "-u", "-m", "http.server", "0", "--bind", "127.0.0.1", "--directory", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdout is not None
        port = process.stdout.readline().split(" port ")[1].split()[0]
        yield f"http://127.0.0.1:{port}", tmp_path
        process.kill()


async def _lags(done: asyncio.Event, clock: Callable[[], float]) -> list[float]:
    """How late a timer of a millisecond is, over and over, in seconds."""
    lags = list[float]()
    while not done.is_set():
        started = clock()
        await asyncio.sleep(0.001)
        lags.append(clock() - started)
    return sorted(lags)


def _clock() -> Callable[[], float]:
    """Wall-clock time; on a busy machine, the CPU time of this process, all its threads included."""
    return time.perf_counter if os.getloadavg()[0] <= len(os.sched_getaffinity(0)) else time.process_time


async def test_the_event_loop_goes_on_while_many_large_images_are_loaded(file_server: tuple[str, Path]) -> None:
    """Twenty by data URL and twenty by HTTP, 4 MB each. The best of three: a machine has other things to do."""
    address, folder = file_server
    for n in range(20):
        (folder / f"{n}.png").write_bytes(png(64, 64) + os.urandom(4_000_000))
    urls = [data_url((folder / f"{n}.png").read_bytes()) for n in range(20)] + [f"{address}/{n}.png" for n in range(20)]
    bomb = data_url(png(60_000, 60_000, 4_000_000))
    tails = list[float]()
    for _ in range(3):
        loader, done = MediaLoader(MediaLimits(allow_private=True)), asyncio.Event()
        timer = asyncio.create_task(_lags(done, _clock()))
        await asyncio.sleep(0.02)
        loaded, refused = await asyncio.gather(
            asyncio.gather(*map(loader.load, urls)),
            asyncio.gather(*map(loader.load, [bomb] * 4), return_exceptions=True),
        )
        done.set()
        lags = await timer
        await loader.aclose()
        assert all(len(file.data) > 4_000_000 for file in loaded)
        assert all(isinstance(error, InvalidMedia) for error in refused)
        tails.append(lags[len(lags) * 99 // 100])
        if tails[-1] < 0.02:
            break
    assert min(tails) < 0.02, tails


async def test_a_host_and_a_request_get_at_most_a_quarter_of_the_places() -> None:
    async with world(concurrency=8) as w:
        w.names |= {f"{n}.test": [PUBLIC] for n in range(8)}
        gates = {f"/{place}{n}": Gate(ok(PNG)) for place in ("host", "request") for n in range(4)}
        w.server.answers |= {**gates, "/a.png": ok(PNG)}

        async def load_all(urls: list[str]) -> None:
            begin_request()
            await all_of(w.loader.load(url) for url in urls)

        async def one_each() -> None:
            await all_of(load_all([f"http://images.test/host{n}"]) for n in range(4))

        slow = [asyncio.create_task(one_each())]
        slow.append(asyncio.create_task(load_all([f"http://{n}.test/request{n}" for n in range(4)])))
        await until(lambda: sum(gate.asked.is_set() for gate in gates.values()) == 4)
        async with asyncio.timeout(10):
            await w.loader.load("http://other.test/a.png")
        assert [name for name, gate in gates.items() if gate.asked.is_set()] == [
            "/host0",
            "/host1",
            "/request0",
            "/request1",
        ]
        for gate in gates.values():
            gate.open.set()
        await asyncio.gather(*slow)
