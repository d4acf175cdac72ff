"""An encoder that asks encode replicas: the choice of a replica, faults, and the local fallback."""

import asyncio
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from engine.errors import EngineNotReady, EngineUnavailable, InvalidRequest
from engine.fake.encoder import FakeEncoder
from engine.media import EncodedMedia, MediaInput
from engine.replicas import ask as client
from engine.replicas import replica as replica_module
from engine.replicas.encode_answers import encode_info
from routers.state import ReplicaState
from tests.support.disaggregated import SECRET, SOON, answer_of, replica, servers
from tests.support.encode import SIZE, encoder_of, expected, image, pages
from tests.support.servers import ROOT, application
from tests.support.waiting import slowness, until


def encoder_in(life: ReplicaState) -> FakeEncoder:
    service: Any = life.service
    encoder: FakeEncoder = service.encoder
    return encoder


@asynccontextmanager
async def unused_port() -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
    yield port


@pytest.mark.parametrize(("inline_kb", "method"), [(1024, "auto"), (1024, ""), (0, "auto"), (0, "tcp"), (0, "")])
async def test_images_go_to_several_replicas_and_come_back_in_order(inline_kb: int, method: str) -> None:
    images = pages(20)
    async with (
        replica("encode", encode_inline_kb=inline_kb) as (one, first),
        replica("encode", encode_inline_kb=inline_kb) as (two, second),
    ):
        async with encoder_of([one, two], method=method) as (encoder, _, seen):
            assert await encoder.encode(images) == await expected(images)
            assert await encoder.encode([]) == []
            assert seen.outcomes == {"ok": 20} and len(seen.by_peer) == 2 and not seen.local
        assert encoder_in(first).encoded + encoder_in(second).encoded == 20
        await until(lambda: not first.running and not second.running)


async def test_the_least_busy_replica_is_asked() -> None:
    slow = replica("encode", fake_token_delay_ms=400), replica("encode", fake_token_delay_ms=400)
    async with slow[0] as (one, first), slow[1] as (two, second), encoder_of([one, two]) as (encoder, _, seen):
        busy = asyncio.create_task(encoder.encode(pages(1)))
        await until(lambda: first.running + second.running == 1)
        await encoder.encode([image(50)])
        assert sorted(seen.by_peer.values()) == [1, 1], "to the one that has nothing else to do"
        await busy


@asynccontextmanager
async def dying_peer(probe: bytes, after: float = 0.0) -> AsyncIterator[str]:
    """URL of a peer that answers probes with `probe`, and images by hanging up, `after` so many seconds."""
    tasks: list[Any] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        tasks.append(asyncio.current_task())
        try:
            while (await reader.readuntil(b"\r\n\r\n")).startswith(b"GET"):
                writer.write(probe)
            await asyncio.sleep(after)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_replica_that_dies_is_asked_no_more_and_another_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "FIRST_PAUSE", 60.0)
    async with (
        replica("encode") as (good, _),
        dying_peer(await probed(good)) as bad,
        encoder_of([bad, good]) as (encoder, _, seen),
    ):
        for index in range(4):
            assert await encoder.encode([image(index)]) == await expected([image(index)])
        assert seen.retries == 1 and seen.outcomes == {"unreachable": 1, "ok": 4}
        assert seen.peers == {bad: False, good: True}


async def test_a_replica_that_says_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_module, "FIRST_PAUSE", 60.0)
    monkeypatch.setattr(client, "SILENCE_SECONDS", 1.0)
    async with (
        replica("encode") as (good, _),
        dying_peer(await probed(good), after=60.0) as hung,
        encoder_of([hung, good]) as parts,
    ):
        encoder, _, seen = parts
        for index in range(2):
            assert await encoder.encode([image(index)]) == await expected([image(index)])
        assert seen.outcomes == {"silent": 1, "ok": 2} and seen.peers == {hung: False, good: True}


async def probed(url: str) -> bytes:
    """The answer of a replica to a probe."""
    async with httpx.AsyncClient(headers={"authorization": f"Bearer {SECRET}"}) as http:
        return answer_of((await http.get(f"{url}/encode")).content)


async def test_without_replicas_images_are_encoded_here_or_refused() -> None:
    async with unused_port() as port:
        url = f"http://127.0.0.1:{port}"
        async with encoder_of([url], local=FakeEncoder()) as (encoder, _, seen):
            assert encoder.healthy
            assert await encoder.encode(pages(9)) == await expected(pages(9))
            assert seen.local == {"no_peer": 9}
        async with encoder_of([url], start=False) as (encoder, _, _):
            starting = asyncio.create_task(encoder.start())
            await asyncio.sleep(0.3)
            assert not starting.done() and not encoder.healthy
            with pytest.raises(EngineNotReady):
                encoder.info  # noqa: B018
            starting.cancel()
            await asyncio.wait([starting])


async def test_a_started_encoder_without_replicas_raises_an_error_for_each_request() -> None:
    async with replica("encode") as (url, life), encoder_of([url]) as (encoder, _, _):
        assert encoder.healthy and encoder.info == encoder_in(life).info
        await encoder_in(life).close()
        with pytest.raises(EngineUnavailable):
            await encoder.encode(pages(1))
        assert not encoder.healthy and encoder.info.placeholder == "<image>"
        with pytest.raises(EngineUnavailable, match=r"no encode replica can take the request: The encoder is closed"):
            await encoder.encode(pages(1))


async def test_replicas_with_another_fingerprint_are_not_used_and_both_are_logged() -> None:
    local = FakeEncoder(rows=4)
    async with replica("encode") as (url, life), encoder_of([url], local=local) as (encoder, peers, seen):
        assert (await encoder.encode(pages(1)))[0].rows == 4 and seen.local == {"no_peer": 1}
        theirs = encoder_in(life).info.fingerprint
        (peer,) = peers.replicas
        assert (
            peers.obstacle(peer, encode_info("fake", "fake", local.info))
            == f"one has fingerprint {theirs}, this replica has {local.info.fingerprint}"
        )


async def test_an_invalid_image_is_refused_without_a_retry() -> None:
    async with (
        replica("encode") as (one, _),
        replica("encode") as (two, _),
        encoder_of([one, two]) as (encoder, _, seen),
    ):
        with pytest.raises(InvalidRequest, match="cannot be decoded") as caught:
            await encoder.encode([MediaInput(b"GIF? no")])
        assert caught.value.param == "image" and seen.outcomes == {"invalid": 1}


async def test_cancelling_reaches_the_replica_at_once() -> None:
    async with replica("encode", fake_token_delay_ms=60_000) as (url, life), encoder_of([url]) as (encoder, _, seen):
        work = asyncio.create_task(encoder.encode(pages(20)))
        await until(lambda: life.running == 20)
        began = time.monotonic()
        work.cancel()
        await asyncio.wait([work])
        assert work.cancelled() and time.monotonic() - began < SOON
        await until(lambda: not life.running, SOON)
        assert seen.outcomes == {"cancelled": 20} and encoder_in(life).encoded == 0


async def test_closing_ends_what_runs_with_an_error() -> None:
    async with replica("encode", fake_token_delay_ms=60_000) as (url, life), encoder_of([url]) as (encoder, _, _):
        work = asyncio.create_task(encoder.encode(pages(1)))
        await until(lambda: life.running == 1)
        await encoder.close()
        with pytest.raises(EngineNotReady, match="closing"):
            await work
        with pytest.raises(EngineNotReady, match="closing"):
            await encoder.encode(pages(1))


async def test_memory_that_cannot_be_read_is_sent_instead_from_then_on() -> None:
    """The replica offers its memory by one method, and this one reads by another."""
    async with replica("encode", encode_inline_kb=0, kv_transfer="shared_memory") as (url, life):
        async with encoder_of([url], method="tcp") as (encoder, _, seen):
            for _ in range(2):
                assert await encoder.encode(pages(2)) == await expected(pages(2))
                assert encoder_in(life).encoded == seen.outcomes["ok"]
            assert 4 < seen.outcomes["ok"] <= 6, "each failed once at most"
        await until(lambda: not life.running)


class Liar(FakeEncoder):
    async def encode(self, media: Sequence[MediaInput], prompt: str = "") -> list[EncodedMedia]:
        return (await super().encode(media))[1:]


async def test_an_answer_with_too_few_images_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.fake.encoder.FakeEncoder", Liar)
    async with replica("encode") as (url, _), encoder_of([url]) as (encoder, _, _):
        with pytest.raises(EngineUnavailable, match="embeddings for 0 images, not for 1"):
            await encoder.encode(pages(2))


async def test_a_front_without_its_first_encode_replica_is_not_ready_and_says_so() -> None:
    async with unused_port() as port:
        flags: dict[str, Any] = {
            "encode_urls": f"http://127.0.0.1:{port}",
            "encode_fallback": "refuse",
            "internal_secret": SECRET,
        }
        async with application(wait=False, **flags) as (client, state):
            while "no encode replica answers" not in (refused := await client.get("/health/ready")).text:
                assert refused.status_code == 503
                await asyncio.sleep(0.01)
            assert refused.status_code == 503 and "no encode replica answers" in refused.json()["error"]["message"]
            assert state["replica"].failure is None
        async with application(**{**flags, "encode_fallback": "local"}) as (_, state):
            assert await state["replica"].service.encoder.encode(pages(1)) == await expected(pages(1))


@pytest.mark.slow
async def test_killed_replicas_cost_no_image_and_all_of_them_a_clear_error() -> None:
    """Three under load: one is killed, then another; every request ends well within ten seconds. Then the last one."""
    flags = ("--disaggregation-mode", "encode", "--fake-token-delay-ms", "30", "--encode-inline-kb", "0")
    with servers(*[flags] * 3) as three:
        async with encoder_of([server.url for server in three]) as (encoder, _, seen):

            async def ask(index: int) -> float:
                images, began = pages(3, 10 * index), time.monotonic()
                assert await encoder.encode(images) == await expected(images)
                return time.monotonic() - began

            asked = []
            for index in range(60):
                asked.append(asyncio.create_task(ask(index)))
                await asyncio.sleep(0.01)
                if index in (20, 40):
                    three[index // 20].process.kill()
            assert max(await asyncio.gather(*asked)) < 10 * slowness()
            assert seen.retries > 0 and not seen.local
            await asyncio.to_thread(three[0].wait_metric, "trtllm_embeddings_held_bytes", 0)
            three[0].process.send_signal(signal.SIGSTOP)  # so that none is answered before the kill
            last = [asyncio.create_task(ask(index)) for index in range(8)]
            await asyncio.sleep(0.05)
            three[0].process.kill()
            began = time.monotonic()
            errors = await asyncio.gather(*last, return_exceptions=True)
            assert time.monotonic() - began < 10 * slowness()
            assert all(isinstance(error, EngineUnavailable) for error in errors)


async def test_a_killed_front_frees_what_was_held_for_it() -> None:
    """The connection is the lease, so nothing else has to notice."""
    async with replica("encode", encode_inline_kb=0, lease_seconds=30) as (url, life):
        code = f"""
import asyncio, sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from tests.support.encode import leased, pages
async def main():
    async with leased({url!r}, pages(2)):
        print("holding", flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        assert await process.stdout.readline() == b"holding\n"
        service: Any = life.service
        assert service.store.held == [2 * SIZE]
        process.kill()
        await process.wait()
        await until(lambda: not life.running and not service.store.held)
