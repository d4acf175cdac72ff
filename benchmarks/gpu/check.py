"""Check the output: compare greedy continuations and their log-probabilities with transformers in float32.

The model has random weights that are rounded to bfloat16 before both sides read them, so only the arithmetic differs.
The yardstick is the error of transformers' own forward pass in the engine's type, on the same tokens. If the engine
rounds to eight bits, so does the yardstick (`emulate`), and the error of transformers without that is reported too, to
show the cost of eight bits.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.gpu.emulate import emulate
from benchmarks.gpu.load import token_ids
from benchmarks.gpu.worker import Continuation, Job, Started, Transcribe, Transcript, work
from engine.config import EmbeddedConfig

PROMPTS, OUTPUT, ALTERNATIVES = 64, 64, 20
LENGTHS = (5, 700)
BATCHES = [1, 32]
SLACK = 1e-4
"""Tolerance in nats, which float32 itself needs."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Errors against float32 in nats, over the log-probabilities of the engine's top alternatives."""

    name: str
    max_error: float
    mean_error: float
    tokens: float
    """Share of positions at which float32 chooses the same token."""
    sequences: float
    """Share of continuations that float32 generates identically."""
    worst_margin: float
    """Largest margin by which float32 prefers another token than the chosen one."""


def check(folder: Path, config: EmbeddedConfig, vocabulary: int, seed: str, log: Path) -> Iterator[list[Agreement]]:
    """Yield, for each of `BATCHES`, the agreements of transformers, the last being the yardstick, and of the engine."""
    rng = random.Random(seed)
    prompts = [token_ids(rng.randrange(*LENGTHS), vocabulary, rng) for _ in range(PROMPTS)]
    transcripts: list[Transcript] = []
    for message in work(Job(config, Transcribe(prompts, OUTPUT, ALTERNATIVES, BATCHES)), log):
        if isinstance(message, Started):
            info = message.info
        elif isinstance(message, Transcript):
            transcripts.append(message)
    device, dtype = info.device, getattr(torch, info.dtype)
    reference, peers = _model(folder, torch.float32, device), {"transformers": _model(folder, dtype, device)}
    weights, cache = config.quantization == "fp8", config.kv_cache_dtype == "fp8"
    if weights or cache:
        rounded = " and ".join(["fp8 weights"] * weights + ["fp8 KV cache"] * cache)
        peers[f"transformers with {rounded}"] = emulate(_model(folder, dtype, device), weights, cache)
    for transcript in transcripts:
        pairs = list(zip(prompts, transcript.continuations, strict=True))
        yield list(agreements(f"batch {transcript.batch}", reference, peers, pairs))


def passes(yardstick: Agreement, engine: Agreement) -> bool:
    """Return whether the engine's error is at most 1.5 times the yardstick's on average, and 3 times at worst.

    The same bounds hold in eight bits, where the yardstick's error is more than ten times that of bfloat16 and many
    tokens are near ties.
    """
    return (
        engine.mean_error <= 1.5 * yardstick.mean_error + SLACK
        and engine.max_error <= 3 * yardstick.max_error + 10 * SLACK
        and engine.tokens >= yardstick.tokens - max(0.02, 0.1 * (1 - yardstick.tokens))
    )


def agreements(
    name: str, reference: Any, peers: dict[str, Any], pairs: list[tuple[list[int], Continuation]]
) -> Iterator[Agreement]:
    """Yield the agreement of each peer with `reference`, then the engine's, over (prompt, continuation) pairs."""
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {f"{name}, {who}": [] for who in (*peers, "engine")}
    for prompt, continuation in pairs:
        exact, *near = (_logprobs(model, prompt, continuation.token_ids) for model in (reference, *peers.values()))
        # The first entry is the chosen token, which is also among the alternatives.
        ids = torch.tensor(
            [[top.token_id for top in entry[1:]] for entry in continuation.logprobs], device=exact.device
        )
        told = torch.tensor(
            [[top.logprob for top in entry[1:]] for entry in continuation.logprobs], device=exact.device
        )
        taken = torch.tensor(continuation.token_ids, device=exact.device)
        said = [(values.gather(1, ids), values.argmax(-1)) for values in near] + [(told, taken)]
        for values, (told_by, choice) in zip(found.values(), said, strict=True):
            margins = exact.max(-1).values - exact.gather(1, choice[:, None])[:, 0]
            values.append(((told_by - exact.gather(1, ids)).abs().cpu(), margins.cpu()))
    for who, values in found.items():
        errors = torch.cat([error.flatten() for error, _ in values])
        margins = torch.cat([margin for _, margin in values])
        yield Agreement(
            who,
            max_error=errors.max().item(),
            mean_error=errors.mean().item(),
            tokens=(margins == 0).float().mean().item(),
            sequences=sum(bool((margin == 0).all()) for _, margin in values) / len(values),
            worst_margin=margins.max().item(),
        )


@torch.inference_mode()
def _logprobs(model: Any, prompt: list[int], continuation: list[int]) -> torch.Tensor:
    """Return log-probabilities at each position of the continuation: [len(continuation), vocabulary]."""
    ids = torch.tensor([prompt + continuation[:-1]], device=model.device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=len(continuation)).logits[0]
    return logits.float().log_softmax(-1)


def _model(folder: Path, dtype: torch.dtype, device: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval()
