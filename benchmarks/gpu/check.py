"""Is the output right? Greedy continuations with log-probabilities, held against transformers in float32 on the same tokens.

The model has random weights, rounded to bfloat16 before both sides read them: what differs is arithmetic. How much it may differ is
what transformers' own forward differs in the engine's type, on the same tokens: the yardstick. Where the engine rounds to eight bits,
the yardstick does so too (`emulate`), and transformers' forward without that is reported besides: the price of eight bits.
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
"""Nats that even float32 may be off."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """How near one computation is to float32. Errors in nats, of the log-probabilities of the engine's top alternatives."""

    name: str
    max_error: float
    mean_error: float
    tokens: float
    """Share of positions where float32 would have taken the same token."""
    sequences: float
    """Share of continuations that float32 would have made token for token."""
    worst_margin: float
    """Where another token was taken, how much float32 preferred its own, at worst."""


def check(folder: Path, config: EmbeddedConfig, vocabulary: int, seed: str, log: Path) -> Iterator[list[Agreement]]:
    """For each of `BATCHES` transformers' agreements, of which the last is the yardstick, then the engine's."""
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
    """Whether the engine's error is no other than that of its type: half as much again on average, three times at worst.

    The same holds in eight bits, where the yardstick's own error is more than ten times that of bfloat16, and many tokens are near ties.
    """
    return (
        engine.mean_error <= 1.5 * yardstick.mean_error + SLACK
        and engine.max_error <= 3 * yardstick.max_error + 10 * SLACK
        and engine.tokens >= yardstick.tokens - max(0.02, 0.1 * (1 - yardstick.tokens))
    )


def agreements(
    name: str, reference: Any, peers: dict[str, Any], pairs: list[tuple[list[int], Continuation]]
) -> Iterator[Agreement]:
    """The agreement of each peer with `reference`, then the engine's, over (prompt, continuation) pairs."""
    found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {f"{name}, {who}": [] for who in (*peers, "engine")}
    for prompt, continuation in pairs:
        exact, *near = (_logprobs(model, prompt, continuation.token_ids) for model in (reference, *peers.values()))
        # The first entry is the token taken, which is among the alternatives as well.
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
    """Of every token at each place of the continuation: [len(continuation), vocabulary]."""
    ids = torch.tensor([prompt + continuation[:-1]], device=model.device)
    logits: torch.Tensor = model(input_ids=ids, use_cache=False, logits_to_keep=len(continuation)).logits[0]
    return logits.float().log_softmax(-1)


def _model(folder: Path, dtype: torch.dtype, device: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True)
    return model.to(device).eval()
