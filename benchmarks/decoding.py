"""Decode steps on a CPU: int8 next to bfloat16 weights, and sampled, seeded, penalised and guided requests next to
greedy ones.

    python -m benchmarks.decoding [--streams 1 4 16] [--rounds 7] [--quantizations none int8] [--rows greedy seed]
        [--isa avx2] [--threads 2]

Engines run in this process, in turns, on the same prompts, from when every stream has its first token. A step's
processor time, or its time if there are several threads, is compared with that of the first quantization, and with that
of greedy requests, in the same round; the tables show medians.
"""

import argparse
import os
import statistics
from pathlib import Path
from typing import Any, get_args

import torch

from benchmarks.speculation import SUBJECTS, Case, core_of, run
from engine.checkpoints.store import resolve_model
from engine.config import CpuIsa
from engine.embedded.core import EngineCore
from engine.embedded.grammar.library import Setup
from engine.embedded.grammar.with_llguidance import Llguidance
from engine.types import Guide
from multimodal.text.tokenizer import Tokenizer
from server.settings import Settings

ROWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 1.0},
    "top-p, top-k": {"temperature": 0.8, "top_p": 0.95, "top_k": 50},
    "seed": {"temperature": 1.0, "seed": 7},
    "seed, top-p": {"temperature": 1.0, "seed": 7, "top_p": 0.95},
    "penalty": {"frequency_penalty": 0.5},
    "logprobs": {"logprobs": 1},
    "guided": {},
}
SCHEMA = '{"type": "array", "items": {"type": "string", "maxLength": 40}, "minItems": 1000}'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=Settings.model_fields["model"].default)
    parser.add_argument("--quantizations", nargs="+", default=["none", "int8"], choices=["none", "int8"])
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS), metavar="ROW")
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--isa", default="auto", choices=get_args(CpuIsa), help="instruction set of the CPU")
    parser.add_argument("--threads", type=int, default=1, help="threads of each engine")
    options = parser.parse_args()
    settings = Settings()
    folder = resolve_model(options.model, settings.cache_dir)
    tokenizer = Tokenizer.load(Path(folder))
    torch.set_num_threads(1)

    def core(quantization: str) -> EngineCore:
        streams, isa = max(options.streams), options.isa
        return core_of(folder, settings, streams, 512, quantization=quantization, threads=options.threads, cpu_isa=isa)

    cores = {quantization: core(quantization) for quantization in options.quantizations}
    runner = next(iter(cores.values())).runner
    library = Llguidance(Setup("llguidance", str(folder), runner.vocab_size, tuple(runner.eos_token_ids)))
    grammar = library.prepare(Guide(kind="json_schema", spec=SCHEMA))[0]
    first, rows = options.quantizations[0], ["greedy", *(row for row in options.rows if row != "greedy")]
    print(f"{folder.name}, {runner.compute_path} {runner.instruction_set}, load {os.getloadavg()[0]}")
    print(f"streams  weights  row             ms a step  share of greedy  times {first}'s speed")
    for streams in options.streams:
        spent: dict[tuple[str, str], list[float]] = {(q, row): [] for q in cores for row in rows}
        with torch.inference_mode():
            for _ in range(options.rounds):
                for (quantization, row), found in spent.items():
                    compiled = grammar if row == "guided" else None
                    asked = [
                        Case(f"Write story {i} about {SUBJECTS[i % len(SUBJECTS)]}.", "", ROWS[row], compiled)
                        for i in range(streams)
                    ]
                    rate = run(cores[quantization], tokenizer, asked, options.tokens, str(streams))
                    seconds = rate.processor if options.threads == 1 else rate.seconds
                    found.append(1e3 * seconds / rate.steps)
        for (quantization, row), found in spent.items():
            share = _ratio(spent[quantization, "greedy"], found)
            speed = _ratio(spent[first, row], found)
            cell = f"{streams:7}  {quantization:7}  {row:14} {statistics.median(found):10.2f}"
            print(f"{cell} {share:16.2f} {speed:13.2f}", flush=True)


def _ratio(reference: list[float], found: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(reference, found, strict=True))


if __name__ == "__main__":
    main()
