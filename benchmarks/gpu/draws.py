"""The kernels that sample, alone on a GPU, by what requests ask for: `python -m benchmarks.gpu.draws`.

Prints the microseconds that drawing a token for each row takes, in a CUDA graph behind another one, for logits as flat
as those of random weights (`flat`) and as steep as a trained model's (`steep`).
"""

import argparse
import random
from typing import Any

import torch

from benchmarks.gpu.cells import ROWS
from benchmarks.kernels import timed
from engine.embedded.models.cuda.sampler import CudaSampler
from engine.embedded.sampling.state import SamplerState
from engine.types import SamplingParams

SPREADS = {"flat": 1.0, "steep": 5.0}
"""Standard deviation of the logits."""
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {},
    "top-k": {"top_k": 50},
    "top-p": {"top_p": 0.95},
    "truncated": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "wide": {"temperature": 1.5, "top_p": 0.99},
    "logprobs": {"logprobs": 1},
}
REPLAYS, ROUNDS = 50, 7


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.draws", description=__doc__)
    parser.add_argument("--vocabulary", type=int, default=128_256)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 64, 256])
    args = parser.parse_args()
    print("logits  rows  " + "".join(f"{kind:>13}" for kind in [*KINDS, "mixed"]))
    with torch.inference_mode():
        for name, spread in SPREADS.items():
            for rows in args.rows:
                logits = torch.randn((rows, args.vocabulary), device="cuda").mul_(spread).to(torch.bfloat16)
                found = [microseconds(logits, [kind] * rows) for kind in KINDS.values()]
                found.append(microseconds(logits, mixed(rows)))
                print(f"{name:6} {rows:5}  " + "".join(f"{each:13.0f}" for each in found), flush=True)


def mixed(rows: int) -> list[dict[str, Any]]:
    """Return what the requests of a batch ask for in which each differs."""
    rng = random.Random(1)
    return [ROWS["mixed"](rng, 256) for _ in range(rows)]


def microseconds(logits: torch.Tensor, requests: list[dict[str, Any]]) -> float:
    """Return what drawing for these rows takes, the median of several rounds."""
    rows, vocabulary = logits.shape
    sampler = CudaSampler(vocabulary, rows, torch.zeros(rows, dtype=torch.int64, device="cuda"), (2,))
    states = [
        SamplerState(SamplingParams(max_tokens=256, **fields), (3, 9), (2,), seed, None, vocabulary, logits.device)
        for seed, fields in enumerate(requests)
    ]
    slots = list(range(rows))
    sampler.enter(slots, [1] * rows, states)
    inputs = [torch.tensor(values, device="cuda") for values in (slots, [1] * rows, [9] * rows)]
    return timed(lambda: sampler.run(logits, *inputs), ROUNDS, REPLAYS) * 1e6


if __name__ == "__main__":
    main()
