"""Measure the way of an image's embeddings from an encode replica's encoder to an engine's device, on one host.

    python -m benchmarks.embeddings                        # a GPU or two: shared memory against CUDA IPC
    python -m benchmarks.embeddings --device cpu           # shared memory in both ways

*Through the front* (EMBEDDING_TRANSFER=front): to memory of the host, into the encode replica's arena, with a digest,
into the other replica's arena, to bytes that its engine maps, and to its device. *Direct* (EMBEDDING_TRANSFER=direct):
they stay in the encoder's memory, from where the engine reads them: by CUDA IPC from a GPU, else by shared memory.
Times are those of the reader, with the message that asks for them and its answer; encoding is left out.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from statistics import median

import msgspec
import torch

from benchmarks.report import table
from engine.embedded.vision.kept import KeptRows, RowsReader
from engine.media import EncodedMedia, RemoteRows
from engine.replicas.encode_answers import EmbeddingStore, decode_answer, fetch
from engine.transfer.arena import Arena
from engine.transfer.shared_bytes import readable, shared_or_copied
from server.bench.machine import describe_machine

ROWS = (64, 256, 1024, 4096, 16384)
"""Tokens of an image, or of several together."""
HIDDEN_SIZE = 4096
TYPE = torch.bfloat16
MOST = max(ROWS) * HIDDEN_SIZE * TYPE.itemsize


class Uncounted:
    """An `EncodeObserver` that counts nothing."""

    def encoded(self, images: int, seconds: float) -> None: ...

    def holds(self, answers: int, size: int) -> None: ...


def main() -> None:
    args = parse()
    if args.own:
        asyncio.run(own(args))
        return
    for key, value in {**describe_machine(), "device": args.device, "hidden size": HIDDEN_SIZE}.items():
        print(f"- {key}: {value}")
    rows = asyncio.run(measure(args))
    print(f"\n{table(['rows', 'KiB', 'through the front, ms', 'direct, ms', 'times'], rows)}\n")
    print(f"Medians of {args.repeats}.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embeddings", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)  # the encode replica
    return parser.parse_args()


async def own(args: argparse.Namespace) -> None:
    """Encode on demand, until standard input ends: a line with the way and a number of rows is answered by one."""
    cuda = args.device == "cuda"
    device = torch.device("cuda", int(torch.cuda.device_count() > 1)) if cuda else torch.device("cpu")
    source = torch.randn((max(ROWS), HIDDEN_SIZE), device=device).to(TYPE)
    staging = torch.empty_like(source, device="cpu", pin_memory=cuda)
    store, held = EmbeddingStore(Arena(4 * MOST, "shared_memory"), 0, Uncounted()), None
    kept, remote = KeptRows(4 * MOST, device, 60.0), None
    print("ready", flush=True)
    for line in sys.stdin:
        way, count = line.split()
        rows = source[: int(count)]
        if way == "direct":
            if remote is not None:
                kept.release(remote)
            remote = kept.put(rows)
            print(msgspec.msgpack.encode(remote).hex(), flush=True)
            continue
        staged = staging[: int(count)].copy_(rows)  # waits for the device
        data = shared_or_copied(staged.view(torch.uint8).numpy().data)
        if held is not None:
            store.free(held)
        answer, held = await store.put([EncodedMedia(text="", rows=len(rows), dtype="bfloat16", data=data)], False)
        print(answer.hex(), flush=True)


@contextmanager
def owner(args: argparse.Namespace) -> Iterator[Callable[[str, int], bytes]]:
    """Yield a call that has the other process make embeddings, in one way, and returns its answer."""
    command = [sys.executable, "-m", "benchmarks.embeddings", "--own", "--device", args.device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        sent, received = process.stdin, process.stdout

        def ask(way: str, rows: int) -> bytes:
            sent.write(f"{way} {rows}\n")
            sent.flush()
            return bytes.fromhex(received.readline())

        assert received.readline() == "ready\n"
        yield ask


async def measure(args: argparse.Namespace) -> list[list[str]]:
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    arena, reader = Arena(4 * MOST, "shared_memory"), RowsReader(2 * MOST, 10.0)
    found = []
    with owner(args) as ask:

        async def through_the_front(rows: int) -> None:
            (media,) = await fetch(decode_answer(ask("front", rows)), arena, 10.0)
            to_device(readable(media.data), device)

        async def direct(rows: int) -> None:
            remote = msgspec.msgpack.decode(ask("direct", rows), type=RemoteRows)
            to_device(readable(await reader.read(remote, device)), device)

        for rows in ROWS:
            by_front = await timed(through_the_front, rows, args.repeats)
            directly = await timed(direct, rows, args.repeats)
            size = rows * HIDDEN_SIZE * TYPE.itemsize
            seconds = [f"{by_front * 1e3:.2f}", f"{directly * 1e3:.2f}", f"{by_front / directly:.1f}"]
            found.append([str(rows), str(size >> 10), *seconds])
    await arena.close()
    await reader.close()
    return found


def to_device(data: bytes | memoryview, device: torch.device) -> None:
    """Do what an engine does with the embeddings of an image."""
    torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=TYPE).to(device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)


async def timed(way: Callable[[int], Awaitable[None]], rows: int, repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        await way(rows)
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


if __name__ == "__main__":
    main()
