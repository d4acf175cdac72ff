"""Compare the router's index of blocks with ai-dynamo-runtime's RadixTree, on the same events and prompts.

    pip install --no-deps ai-dynamo-runtime && python -m benchmarks.routing_index

Both read the messages that replicas publish. RadixTree takes events as JSON, and block hashes that its own function
computes from tokens.
"""

import argparse
import json
import random
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import msgspec

from benchmarks.report import table
from engine.replicas.publisher.messages import BlockStored, EventBatch, encode
from engine.replicas.routing.events import decode
from engine.replicas.routing.index import PrefixIndex
from server.bench.machine import describe_machine

BLOCK = 32


def payloads(prompts: list[list[int]]) -> list[bytes]:
    """Return the messages that a replica publishes when it computes these prompts, one per prompt."""
    return [encode(EventBatch(0.0, [_stored(tokens)], 0)) for tokens in prompts]


def _stored(tokens: list[int]) -> BlockStored:
    hashes = [hash(tuple(tokens[:end])) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
    return BlockStored(block_hashes=hashes, parent_block_hash=None, token_ids=tokens, block_size=BLOCK)


class Ours:
    """`engine/replicas/routing`."""

    def __init__(self) -> None:
        self._index = PrefixIndex()

    def apply(self, replica: int, payload: bytes) -> None:
        for event in decode(payload):
            self._index.apply(replica, event)

    def find(self, tokens: list[int]) -> dict[int, int]:
        return self._index.overlaps(tokens)


class Dynamo:
    """RadixTree, used as in its own router."""

    def __init__(self) -> None:
        from dynamo import llm  # noqa: PLC0415 - says in `main` what is missing

        self._llm: Any = llm
        self._tree: Any = llm.RadixTree()

    def apply(self, replica: int, payload: bytes) -> None:
        for event in msgspec.msgpack.decode(payload)[1]:
            hashes = self._llm.compute_block_hash_for_seq(event["token_ids"], BLOCK)
            names = [value % (1 << 64) for value in event["block_hashes"]]
            blocks = [{"block_hash": name, "tokens_hash": tokens} for name, tokens in zip(names, hashes, strict=True)]
            data = {"stored": {"parent_hash": None, "blocks": blocks}}
            self._tree.apply_event(replica, json.dumps({"event_id": 0, "data": data}).encode())

    def find(self, tokens: list[int]) -> dict[int, int]:
        scores = self._tree.find_matches(self._llm.compute_block_hash_for_seq(tokens, BLOCK)).scores
        return {worker: blocks * BLOCK for (worker, _), blocks in scores.items()}


def measure(
    make: Callable[[], "Ours | Dynamo"], replicas: list[list[bytes]], prompts: list[list[int]]
) -> tuple[dict[str, float], list[Any]]:
    """Return microseconds, and the blocks found."""
    index = make()
    began = time.perf_counter()
    for replica, messages in enumerate(replicas):
        for payload in messages:
            index.apply(replica, payload)
    applied = time.perf_counter() - began
    found, times = [], []
    for tokens in prompts:
        began = time.perf_counter()
        found.append(index.find(tokens))
        times.append(time.perf_counter() - began)
    blocks = sum(len(messages) for messages in replicas) * (len(prompts[0]) // BLOCK)
    return {
        "to apply an event, for each block, us": applied / blocks * 1e6,
        "to look a prompt up, p50, us": median(times) * 1e6,
    }, found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing_index", description=__doc__, allow_abbrev=False)
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=500, help="prompts that each replica has computed")
    parser.add_argument(
        "--tokens", type=int, default=4096, help="tokens per prompt, half of them in a shared system prompt"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rng = random.Random(args.seed)
    system = [rng.randrange(50_000) for _ in range(args.tokens // 2)]
    prompts = [
        [system + [rng.randrange(50_000) for _ in range(args.tokens - len(system))] for _ in range(args.prompts)]
        for _ in range(args.replicas)
    ]
    replicas = [payloads(each) for each in prompts]
    asked = rng.sample([tokens for each in prompts for tokens in each], 200)
    rows = {}
    answers = []
    for name, make in (("ours", Ours), ("RadixTree", Dynamo), ("ours again", Ours)):
        rows[name], found = measure(make, replicas, asked)
        answers.append(found)
    assert answers[0] == answers[1], "the two indexes find different blocks"
    for key, value in (describe_machine() | vars(args)).items():
        print(f"- {key}: {value}")
    names = list(rows["ours"])
    print(
        "\n" + table(["", *names], [[name, *(f"{row[column]:.1f}" for column in names)] for name, row in rows.items()])
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
