"""A process that keeps embeddings on a GPU, as a tower does: `python -m tests.support.kept_owner ROWS`.

It prints where they are as a line of hexadecimal msgpack, gives their place to others at the first line that it reads,
and ends at the next, or at the end of its input.
"""

import os
import sys

import msgspec
import torch

from engine.embedded.vision.kept import KeptRows

COLUMNS = 128


def rows_of(count: int, seed: int) -> torch.Tensor:
    return torch.randn((count, COLUMNS), generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def main() -> None:
    count, device = int(sys.argv[1]), torch.device("cuda", torch.cuda.device_count() - 1)
    kept = KeptRows(rows_of(count, 0).nbytes, device, 60.0)
    for seed in (0, 1):
        rows = kept.put(rows_of(count, seed).to(device))
        assert rows is not None
        print(msgspec.msgpack.encode(rows).hex(), flush=True)  # noqa: T201 - what the test reads
        sys.stdin.readline()
        kept.release(rows)
    os._exit(0)


if __name__ == "__main__":
    main()
