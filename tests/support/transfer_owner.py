"""A process whose memory the transfer tests read: `python transfer_owner.py METHOD SIZE...`, region by region.

It prints its offers as one line of hexadecimal msgpack, then obeys lines: `forget` closes the memory's descriptors,
anything else ends the process.
"""

import ctypes
import os
import random
import sys

import msgspec

from engine.transfer.base import Region
from engine.transfer.shared_memory import shared_memory
from engine.transfer.transfers import Transfers
from tests.support import fake_cuda

PATTERN = 1 << 20


def content(region: int, size: int) -> bytes:
    """What a region holds: one random MiB after another, all alike."""
    return (random.Random(region).randbytes(PATTERN) * (size // PATTERN + 1))[:size]


def main() -> None:
    method = sys.argv[1]
    if on_gpu := method == "cuda_ipc":
        fake_cuda.install()
    memories = [(fake_cuda.allocate if on_gpu else shared_memory)(int(size)) for size in sys.argv[2:]]
    regions = []
    for number, memory in enumerate(memories):
        pattern = content(number, PATTERN)
        for start in range(0, len(memory), PATTERN):
            part = min(PATTERN, len(memory) - start)
            memory[start : start + part] = pattern[:part]
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        regions.append(Region(address, len(memory), 0 if on_gpu else -1))
    transfers = Transfers(regions, method)
    print(msgspec.msgpack.encode(transfers.offers()).hex(), flush=True)  # noqa: T201 - what the test reads
    for line in sys.stdin:
        if line.strip() != "forget":
            break
        for name in os.listdir("/proc/self/fd"):
            if (
                int(name) > 2
                and os.path.exists(f"/proc/self/fd/{name}")
                and os.readlink(f"/proc/self/fd/{name}").startswith("/memfd:trellis")
            ):
                os.close(int(name))
        print("forgotten", flush=True)  # noqa: T201
    os._exit(0)


if __name__ == "__main__":
    main()
