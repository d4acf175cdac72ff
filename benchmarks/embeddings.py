"""Measure the way of an image's embeddings from an encode replica's GPU to a prefill replica's, on one host.

    python -m benchmarks.embeddings                        # a GPU or two: shared memory against CUDA IPC
    python -m benchmarks.embeddings --device cpu           # shared memory alone

Shared memory is the way that replicas take: to pinned memory of the host, into the arena, with a digest, into the other
replica's arena, to bytes that its engine maps, and to the GPU. CUDA IPC copies from one GPU's memory into the other's,
or within one, as KV blocks move; what would cache such embeddings is left out. Times are those of the reader, with the
message that asks for them and its answer.
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
from engine.media import EncodedMedia
from engine.replicas.encode_answers import EmbeddingStore, decode_answer, fetch
from engine.transfer.arena import Arena
from engine.transfer.base import Offer, Read, Region
from engine.transfer.shared_bytes import readable, shared_or_copied
from engine.transfer.transfers import Transfers
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
    print(f"\n{table(['rows', 'KiB', 'shared memory, ms', 'CUDA IPC, ms', 'times'], rows)}\n")
    print(f"Medians of {args.repeats}.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.embeddings", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)  # the encode replica
    return parser.parse_args()


def gpu_memory(device: torch.device) -> tuple[torch.Tensor, Transfers]:
    """Return memory of a GPU, and its transfers."""
    memory = torch.full((MOST,), 7, dtype=torch.uint8, device=device)
    torch.cuda.synchronize(device)
    return memory, Transfers([Region(memory.data_ptr(), MOST, device.index)], "cuda_ipc")


async def own(args: argparse.Namespace) -> None:
    """Encode on demand, until standard input ends: a line with the way and a number of rows is answered by one."""
    cuda = args.device == "cuda"
    device = torch.device("cuda", int(torch.cuda.device_count() > 1)) if cuda else torch.device("cpu")
    source = torch.randn((max(ROWS), HIDDEN_SIZE), device=device).to(TYPE)
    staging = torch.empty_like(source, device="cpu", pin_memory=cuda)
    store, place = EmbeddingStore(Arena(4 * MOST, "shared_memory"), 0, Uncounted()), None
    offers: tuple[Offer, ...] = ()
    if cuda:
        memory, transfers = gpu_memory(device)
        offers = transfers.offers()
    print(msgspec.msgpack.encode(offers).hex(), flush=True)
    for line in sys.stdin:
        way, count = line.split()
        rows = source[: int(count)]
        if way == "ipc":
            memory[: rows.nbytes].copy_(rows.flatten().view(torch.uint8))
            torch.cuda.synchronize(device)
            print(flush=True)
            continue
        staged = staging[: int(count)].copy_(rows)  # waits for the device
        data = shared_or_copied(staged.view(torch.uint8).numpy().data)
        if place is not None:
            store.free(place)
        answer, place = await store.put([EncodedMedia(text="", rows=len(rows), dtype="bfloat16", data=data)], False)
        print(answer.hex(), flush=True)


@contextmanager
def owner(args: argparse.Namespace) -> Iterator[Callable[[str, int], bytes]]:
    """Yield a call that has the other process make embeddings, in one way, and returns its answer."""
    command = [sys.executable, "-m", "benchmarks.embeddings", "--own", "--device", args.device]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        sent, received = process.stdin, process.stdout

        def ask(way: str = "", rows: int = 0) -> bytes:
            if way:
                sent.write(f"{way} {rows}\n")
                sent.flush()
            return bytes.fromhex(received.readline())

        yield ask


async def measure(args: argparse.Namespace) -> list[list[str]]:
    cuda = args.device == "cuda"
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    arena = Arena(4 * MOST, "shared_memory")
    found = []
    with owner(args) as ask:
        offers = msgspec.msgpack.decode(ask(), type=tuple[Offer, ...])
        memory, transfers = gpu_memory(device) if cuda else (None, None)

        async def by_shared_memory(rows: int) -> None:
            (media,) = await fetch(decode_answer(ask("shared", rows)), arena, 10.0)
            data = readable(media.data)
            torch.frombuffer(bytearray(data) if isinstance(data, bytes) else data, dtype=TYPE).to(device)
            settle(device)

        async def by_ipc(rows: int) -> None:
            assert transfers is not None
            ask("ipc", rows)
            transfer = transfers.read(offers, [Read(0, 0, 0, rows * HIDDEN_SIZE * TYPE.itemsize)])
            while not transfer.done():  # noqa: ASYNC110 - it is polled
                await asyncio.sleep(0)

        for rows in ROWS:
            shared = await timed(by_shared_memory, rows, args.repeats)
            ipc = await timed(by_ipc, rows, args.repeats) if cuda else float("nan")
            size = rows * HIDDEN_SIZE * TYPE.itemsize
            found.append([str(rows), str(size >> 10), f"{shared * 1e3:.2f}", f"{ipc * 1e3:.2f}", f"{shared / ipc:.1f}"])
        if transfers is not None:
            transfers.close()
    await arena.close()
    del memory
    return found


async def timed(way: Callable[[int], Awaitable[None]], rows: int, repeats: int) -> float:
    seconds = []
    for _ in range(repeats + 2):
        start = time.perf_counter()
        await way(rows)
        seconds.append(time.perf_counter() - start)
    return median(seconds[2:])


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
