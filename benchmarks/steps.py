"""Steps of the compiled decoder on a CPU, by instruction set: rows of decodes, and prompts.

    python -m benchmarks.steps [--isa avx512_vnni avx512_bf16] [--quantization int8] [--rounds 7] [--threads 1]

The same steps run at each level (`CPU_ISA`) in turns in this process. Figures are milliseconds of processor time for
one thread, and of elapsed time for several; medians of the rounds.
"""

import argparse
import os
import statistics
import time
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from engine.checkpoints.store import resolve_model
from engine.config import EmbeddedConfig
from engine.embedded.models.native.levels import available
from engine.embedded.models.native.runner import NativeRunner
from engine.embedded.models.runner import StepInput
from server.settings import Settings

BLOCK = 32
STEPS: dict[str, tuple[int, int, int]] = {
    "1 row behind 60 tokens": (1, 1, 60),
    "1 row behind 500": (1, 1, 500),
    "2 rows behind 60": (2, 1, 60),
    "4 rows": (4, 1, 60),
    "8 rows": (8, 1, 60),
    "16 rows": (16, 1, 60),
    "32 rows": (32, 1, 60),
    "32 rows behind 500": (32, 1, 500),
    "64 rows": (64, 1, 60),
    "a prompt of 41": (1, 41, 0),
    "a prompt of 505": (1, 505, 0),
    "256 tokens behind 256": (1, 256, 256),
}
"""Sequences, the tokens that each computes, and the tokens that each has before."""
ROOM = 544
"""Tokens that the blocks of a sequence hold."""


def step_of(parts: Sequence[tuple[int, int]], block: int) -> StepInput:
    """Return a step of sequences with blocks of their own; of each, the tokens before it and those it computes."""
    starts, lengths = [start for start, _ in parts], [length for _, length in parts]
    counts = [-(-(start + length) // block) for start, length in parts]
    firsts = accumulate(counts, initial=0)
    return StepInput(
        tokens=[(7 * token) % 5000 + 10 for token in range(sum(lengths))],
        positions=[position for start, length in parts for position in range(start, start + length)],
        starts=starts,
        lengths=lengths,
        slots=[*range(len(parts))],
        admissions=[0] * len(parts),
        tables=[[[*range(first, first + count)]] for first, count in zip(firsts, counts, strict=False)],
        sampled=[1] * len(parts),
        rows=[end - 1 for end in accumulate(lengths)],
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    levels = [level.name for level in available()]
    parser.add_argument("--model", default=Settings.model_fields["model"].default)
    parser.add_argument("--isa", nargs="+", default=levels[-2:], choices=levels)
    parser.add_argument("--quantization", default="none", choices=["none", "int8"])
    parser.add_argument("--steps", nargs="+", default=list(STEPS), choices=list(STEPS), metavar="STEP")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    settings = Settings()
    folder = resolve_model(options.model, settings.cache_dir)
    runners = {
        isa: NativeRunner(
            EmbeddedConfig(
                model=str(folder),
                cpu_isa=isa,
                quantization=options.quantization,
                threads=options.threads,
                max_batch_size=64,
                num_blocks=64 * (ROOM // BLOCK),
                kv_block_size=BLOCK,
                cache_dir=str(settings.cache_dir),
            )
        )
        for isa in options.isa
    }
    clock = time.thread_time if options.threads == 1 else time.perf_counter
    print(f"{Path(folder).name}, {options.quantization}, threads {options.threads}, load {os.getloadavg()[0]:.1f}")
    print(f"{'step':24}" + "".join(f"{isa:>14}" for isa in runners) + "   first / last")
    for name in options.steps:
        sequences, length, before = STEPS[name]
        step = step_of([(before, length)] * sequences, BLOCK)
        found: dict[str, list[float]] = {isa: [] for isa in runners}
        for turn in range(options.rounds + 1):
            for isa, runner in runners.items():
                repeats = 3 if len(step.tokens) < 100 else 1
                began = clock()
                for _ in range(repeats):
                    runner.forward(step)
                if turn:  # the first touches memory
                    found[isa].append(1e3 * (clock() - began) / repeats)
        medians = [statistics.median(times) for times in found.values()]
        print(f"{name:24}" + "".join(f"{value:14.2f}" for value in medians) + f"{medians[0] / medians[-1]:15.2f}")


if __name__ == "__main__":
    main()
