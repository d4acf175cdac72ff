"""A process whose GPU memory the transfer tests read: `python transfer_gpu_owner.py METHOD SIZE DEVICE`.

Its memory is one region amid a larger allocation. It prints its offers as transfer_owner.py does and ends at a line, or
at the end of its input.
"""

import os
import sys

import msgspec
import torch

from engine.transfer.base import Region
from engine.transfer.transfers import Transfers
from tests.support.transfer_owner import PATTERN, content

AROUND = 4096


def on_gpu(size: int, device: int) -> tuple[torch.Tensor, Region]:
    """Zeros, not at the start of their allocation."""
    whole = torch.zeros(size + 2 * AROUND, dtype=torch.uint8, device=f"cuda:{device}")
    torch.cuda.synchronize(device)
    inner = whole[AROUND : AROUND + size]
    return inner, Region(inner.data_ptr(), size, device)


def main() -> None:
    size, device = int(sys.argv[2]), int(sys.argv[3])
    memory, region = on_gpu(size, device)
    memory.view(-1, PATTERN)[:] = torch.frombuffer(bytearray(content(0, PATTERN)), dtype=torch.uint8)
    torch.cuda.synchronize(device)
    transfers = Transfers([region], sys.argv[1])
    print(msgspec.msgpack.encode(transfers.offers()).hex(), flush=True)  # noqa: T201 - what the test reads
    sys.stdin.readline()
    os._exit(0)


if __name__ == "__main__":
    main()
