"""Speculation by lookup on a GPU where most of an answer repeats its prompt: `python -m benchmarks.gpu.editing`.

The model has the shape of Llama 3.1 8B and weights that write a known text: what layers add to the residual stream is
zero, and the head turns each token into one that follows it. The prompt is a file, and the answer the same file with
one token in 25 changed, as edits by a real model repeat 96 % of their file (docs/log.md). A step costs what it costs
with other weights. Plain and speculating engines run the same requests in turns in this process; ratios are medians
over the rounds.
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.chip import chip
from benchmarks.gpu.model import SHAPES, write_folder
from benchmarks.speculation import BLOCK, Rate, drafted, run_requests, wait_for_compilers
from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.types import GenerateRequest, SamplingParams

FIRST, APART = 1000, 600
"""Token ids of the streams: the first one's begin at FIRST, the next one's APART later."""
LENGTH, UNCHANGED = 560, 25
"""Tokens of a file; every UNCHANGED-th is another one in the answer."""


def prompt_of(stream: int) -> list[int]:
    """Return a file of tokens that differ, and one that asks for it."""
    first = FIRST + stream * APART
    return [*range(first, first + LENGTH), first + APART - 1]


def answer_of(stream: int) -> list[int]:
    first = FIRST + stream * APART
    edits = iter(range(first + LENGTH, first + APART - 1))
    return [next(edits) if place % UNCHANGED == UNCHANGED - 1 else first + place for place in range(LENGTH)]


@torch.inference_mode()
def teach(core: EngineCore, streams: int) -> None:
    """Have the model write the answer of each stream."""
    decoder: Any = core.runner._decoder  # type: ignore[attr-defined]
    for layer in decoder._layers:
        layer.out.values.zero_()
        layer.down.values.zero_()
    embedding, head = decoder._embedding, decoder._head
    generator = torch.Generator(embedding.device).manual_seed(0)
    for some in embedding.split(4096):  # nearly orthogonal
        some.copy_(torch.randn(some.shape, generator=generator, device=some.device) / some.shape[1] ** 0.5)
    decoder._norm[0].fill_(1.0)
    after = torch.arange(1, len(head) + 1) % len(head)
    for stream in range(streams):
        text = [prompt_of(stream)[-1], *answer_of(stream)]
        after[text[:-1]] = torch.tensor(text[1:])
    head.zero_()
    head.index_add_(0, after.to(head.device), embedding[: len(head)])


def requests(streams: int, salt: str) -> list[GenerateRequest]:
    sampling = SamplingParams(max_tokens=LENGTH, temperature=0.0, ignore_eos=True)
    return [
        GenerateRequest(
            request_id=str(stream),
            prompt_token_ids=tuple(prompt_of(stream)),
            sampling=sampling,
            cache_salt=salt,
        )
        for stream in range(streams)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--modes", nargs="+", default=["ngram", "suffix"], choices=["ngram", "suffix"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    most = max(options.streams)
    if options.device == "cuda":
        print(f"chip: {chip()}")
    with tempfile.TemporaryDirectory(prefix="trellis-editing-") as folder, torch.inference_mode():
        write_folder(Path(folder), SHAPES[options.shape])
        cores = {mode: core_of(folder, options.device, mode, most) for mode in ("none", *options.modes)}
        for core in cores.values():
            teach(core, most)
        print("streams  mode     tok/s  tokens/step  accepted  times as fast (rounds)")
        for streams in options.streams:
            rates: dict[str, list[Rate]] = {mode: [] for mode in cores}
            before = {mode: drafted(core) for mode, core in cores.items()}
            for turn in range(options.rounds + 1):
                for mode, core in cores.items():
                    rate = run_requests(core, requests(streams, f"{streams} {turn}"))
                    assert rate.answers == [answer_of(stream) for stream in range(streams)], f"{mode} wrote other text"
                    if turn:  # the first loads kernels and learns what is accepted
                        rates[mode].append(rate)
            for mode, found in rates.items():
                times = [plain.seconds / rate.seconds for rate, plain in zip(found, rates["none"], strict=True)]
                speed = statistics.median(rate.speed for rate in found)
                length = statistics.median(rate.tokens / rate.steps / streams for rate in found)
                new, right = (now - old for now, old in zip(drafted(cores[mode]), before[mode], strict=True))
                share = f"{right / new:8.0%}" if new else "       -"
                rounds = ", ".join(f"{time:.2f}" for time in times)
                cell = f"{streams:7}  {mode:6} {speed:7.0f} {length:12.2f}  {share}"
                print(f"{cell}  {statistics.median(times):.2f} ({rounds})", flush=True)


def core_of(folder: str, device: str, mode: str, streams: int) -> EngineCore:
    config = EmbeddedConfig(
        model=folder,
        device=device,
        dtype="bfloat16",
        attention="flashinfer" if device == "cuda" else "auto",
        load_format="dummy",
        max_batch_size=streams,
        max_num_tokens=8192,
        max_seq_len=2048,
        num_blocks=streams * (2 * LENGTH // BLOCK + 2),
        kv_block_size=BLOCK,
        speculative=mode,  # type: ignore[arg-type]
    )
    core = EngineCore(config, lambda _: None)
    wait_for_compilers()
    return core


if __name__ == "__main__":
    main()
