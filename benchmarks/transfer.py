"""Measure transfers of KV blocks between two processes, for prompts of 512, 4k and 16k tokens of an 8B model.

    python -m benchmarks.transfer --method shared_memory tcp nixl              # host memory
    python -m benchmarks.transfer --method cuda_ipc nixl --device cuda         # from GPU 1 to 0, or within one GPU

A token of Llama 3.1 8B has 131,072 bytes of keys and values in bfloat16, a block of 32 tokens 4 MiB over all layers.
Contiguous blocks are one range on both sides; scattered blocks are in random order, as in a cache after some use.
"""

import argparse
import ctypes
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median

import msgspec

from benchmarks.report import table
from engine.transfer.base import Offer, Read, Region
from engine.transfer.shared_memory import shared_memory
from engine.transfer.transfers import METHODS, Transfers
from server.bench.machine import describe_machine

TOKENS = (512, 4096, 16384)
TOKENS_PER_BLOCK = 32
POLL_SECONDS = 50e-6


def main() -> None:
    args = parse()
    if args.own:
        own(args)
        return
    for key, value in {
        **describe_machine(),
        "device": devices(args),
        "blocks": args.blocks,
        "bytes of a block": args.block_bytes,
    }.items():
        print(f"- {key}: {value}")
    rows = [row for method in args.method for row in measure(args, method)]
    head = ["method", "tokens", "MiB", "first, ms", "contiguous, ms", "GB/s", "scattered, ms", "GB/s"]
    print(f"\n{table(head, rows)}\n")
    print(f"Medians of {args.repeats}; `first` includes connecting to the peer and opening its memory.")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.transfer", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--method", nargs="+", choices=[*METHODS, "auto"], default=["auto"])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--blocks", type=int, default=max(TOKENS) // TOKENS_PER_BLOCK, help="blocks in the cache of each process"
    )
    parser.add_argument("--block-bytes", type=int, default=4 << 20)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--own", action="store_true", help=argparse.SUPPRESS)  # the other process
    return parser.parse_args()


def devices(args: argparse.Namespace) -> str:
    return "host memory" if args.device == "cpu" else f"GPU {other_gpu()} to GPU 0"


def other_gpu() -> int:
    import torch  # noqa: PLC0415 - not needed for host memory

    return int(torch.cuda.device_count() > 1)


def allocate(args: argparse.Namespace, gpu: int, fill: int) -> tuple[object, Region]:
    """Return a cache filled with the byte `fill`, and its owner."""
    size = args.blocks * args.block_bytes
    if args.device == "cuda":
        import torch  # noqa: PLC0415

        tensor = torch.full((size,), fill, dtype=torch.uint8, device=f"cuda:{gpu}")
        torch.cuda.synchronize(gpu)
        return tensor, Region(tensor.data_ptr(), size, gpu)
    memory = shared_memory(size)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    ctypes.memset(address, fill, size)
    return memory, Region(address, size, -1)


def own(args: argparse.Namespace) -> None:
    """Offer a cache until standard input ends."""
    memory, region = allocate(args, other_gpu() if args.device == "cuda" else 0, fill=7)
    transfers = Transfers([region], args.method[0])
    print(msgspec.msgpack.encode(transfers.offers()).hex(), flush=True)
    sys.stdin.read()
    transfers.close()
    del memory


@contextmanager
def owner(args: argparse.Namespace, method: str) -> Iterator[tuple[Offer, ...]]:
    sizes = ["--blocks", str(args.blocks), "--block-bytes", str(args.block_bytes), "--device", args.device]
    command = [sys.executable, "-m", "benchmarks.transfer", "--own", "--method", method, *sizes]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        yield msgspec.msgpack.decode(bytes.fromhex(process.stdout.readline()), type=tuple[Offer, ...])


def measure(args: argparse.Namespace, method: str) -> Iterator[list[str]]:
    memory, region = allocate(args, 0, fill=0)
    transfers = Transfers([region], method)
    with owner(args, method) as offers:
        first = timed(transfers, offers, [Read(0, 0, 0, args.block_bytes)])
        for tokens in TOKENS:
            count = tokens // TOKENS_PER_BLOCK
            if count > args.blocks:
                continue
            size = count * args.block_bytes
            row = [method, str(tokens), str(size >> 20), f"{first * 1e3:.1f}"]
            for reads in (contiguous(count, args.block_bytes), scattered(count, args.blocks, args.block_bytes)):
                seconds = median(timed(transfers, offers, reads) for _ in range(args.repeats))
                row += [f"{seconds * 1e3:.2f}", f"{size / seconds / 1e9:.2f}"]
            yield row
    transfers.close()
    del memory


def contiguous(count: int, size: int) -> list[Read]:
    return [Read(0, block * size, block * size, size) for block in range(count)]


def scattered(count: int, blocks: int, size: int) -> list[Read]:
    chance = random.Random(count)
    pairs = zip(chance.sample(range(blocks), count), chance.sample(range(blocks), count), strict=True)
    return [Read(0, theirs * size, ours * size, size) for theirs, ours in pairs]


def timed(transfers: Transfers, offers: Sequence[Offer], reads: Sequence[Read]) -> float:
    start = time.perf_counter()
    transfer = transfers.read(offers, reads)
    while not transfer.done():
        time.sleep(POLL_SECONDS)
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
