"""Speculative decoding on this machine: how much faster than without, for text that repeats and text that does not.

    python -m benchmarks.speculation [--modes ngram suffix] [--streams 1 16] [--repeats 6] [--draft-model FOLDER]
    python -m benchmarks.speculation --model qwen2.5-coder-0.5b --workloads edit --streams 1 --quantization int8

Engines without and with speculation run in this process, in turns, on the same requests, of which each stream sends
`--turns` one after the other. `edit`: chats that ask for a changed file; of what a model that can edit answers, most
repeats the file, and the table shows how much. `predicted`: the same with the file as `prediction`. `story`: sampled
text of its own. `held-out`: greedy answers to prompts that the head in `smoleagle/` was not trained on. Rates are of
output tokens, from when every stream has its first one until one has no more requests; ratios are medians over the
repetitions, each against the plain engine in the same one. Processor time says more than time where others use the
machine. On a CPU every answer must be the plain engine's; on a GPU, whose products round differently for other numbers
of rows, `same` is the share of answers that are.
"""

import argparse
import gc
import itertools
import os
import random
import statistics
import threading
import time
from collections import deque
from collections.abc import Iterable
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple, get_args

import torch

from engine.checkpoints.store import resolve_head, resolve_model
from engine.config import CpuIsa, EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.embedded.grammar.compiler import Matcher
from engine.embedded.grammar.library import Compiled
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sequence import Sequence
from engine.embedded.threads import compute_threads
from engine.types import Delta, GenerateRequest, SamplingParams
from multimodal.text.tokenizer import Tokenizer
from server.settings import Settings
from smoleagle.prompts import message

REPORT = """def read_rows(path):
    rows = []
    with open(path) as file:
        for line in file:
            line = line.strip()
            if not line or line.startswith("#"):
                continue
            rows.append(line.split(","))
    return rows


def total(rows, column):
    result = 0.0
    for row in rows:
        value = float(row[column])
        if value < 0:
            raise ValueError("negative value in column %d" % column)
        result += value
    return result


def report(path, column):
    rows = read_rows(path)
    amount = total(rows, column)
    print("rows:", len(rows))
    print("total:", amount)
    if rows:
        print("mean:", amount / len(rows))
"""
QUEUE = """class Queue:
    def __init__(self, limit):
        self.items = []
        self.limit = limit

    def push(self, item):
        if len(self.items) >= self.limit:
            raise OverflowError("the queue is full")
        self.items.append(item)

    def pop(self):
        if not self.items:
            raise IndexError("the queue is empty")
        item = self.items[0]
        self.items = self.items[1:]
        return item

    def peek(self):
        if not self.items:
            return None
        return self.items[0]

    def size(self):
        return len(self.items)
"""
WORDS = """import sys


def count_words(text):
    counts = {}
    for word in text.lower().split():
        word = word.strip(".,;:!?")
        if word:
            counts[word] = counts.get(word, 0) + 1
    return counts


def most_common(counts, number):
    pairs = sorted(counts.items(), key=lambda pair: pair[1], reverse=True)
    return pairs[:number]


def main():
    with open(sys.argv[1]) as file:
        counts = count_words(file.read())
    for word, count in most_common(counts, 10):
        print(word, count)


main()
"""
EDITS = (
    (REPORT, "Rename the function `total` to `column_total`"),
    (QUEUE, "Add a method `clear` that removes all items"),
    (WORDS, "Let `main` print 20 words instead of 10"),
    (REPORT, "Skip rows that are too short for the column, in `total`"),
    (QUEUE, "Raise `ValueError` instead of `IndexError`"),
    (WORDS, "Read the text as UTF-8"),
)
SUBJECTS = ("a fisherman and the sea", "a train that is late", "two sisters in the mountains", "the first robot cook")
BLOCK = 32


class Case(NamedTuple):
    """A request: its prompt, what is predicted, how it is sampled, and its grammar."""

    prompt: str
    prediction: str = ""
    sampling: dict[str, Any] = {}
    grammar: Compiled | None = None


class Rate(NamedTuple):
    """Figures of one run."""

    answers: list[list[int]]
    seconds: float
    processor: float
    steps: int
    tokens: int

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def cases(workload: str, streams: int, repeat: int) -> list[Case]:
    """Return the requests of a run, no two of which are the same."""
    if workload == "held-out":
        rng = random.Random(repeat)
        return [Case(message(rng, held_out=True)) for _ in range(streams)]
    if workload == "story":
        sampling = {"temperature": 1.0}
        return [
            Case(f"Write a long story about {SUBJECTS[i % len(SUBJECTS)]}.", "", sampling | {"seed": 100 * repeat + i})
            for i in range(streams)
        ]
    found = []
    for index in range(repeat, repeat + streams):
        file, change = EDITS[index % len(EDITS)]
        asked = f"Change this Python file. {change}. Answer with the whole file:\n```python\n{file}```"
        found.append(Case(asked, file if workload == "predicted" else "", {"ignore_eos": False}))
    return found


def repeated(case: Case, answer: list[int], tokenizer: Tokenizer) -> float:
    """Return the share of an answer's tokens that repeat the prompt, four or more at a time."""
    matcher = SequenceMatcher(None, tokenizer.encode(case.prompt), answer, autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks() if block.size >= 4) / max(len(answer), 1)


def core_of(folder: Path, settings: Settings, streams: int, length: int, **options: Any) -> EngineCore:
    """Return an engine of this process with room for `length` tokens in each stream; `options` are EmbeddedConfig's."""
    config = EmbeddedConfig(
        model=str(folder),
        max_batch_size=streams,
        num_blocks=streams * (length // BLOCK),
        kv_block_size=BLOCK,
        cache_dir=str(settings.cache_dir),
        **options,
    )
    core = EngineCore(config, lambda _: None)
    wait_for_compilers()
    return core


def wait_for_compilers() -> None:
    """Wait until no kernels are compiled beside the engine, which takes the processor from it for a minute."""
    for thread in threading.enumerate():
        if thread.name == "flashinfer":
            thread.join()


def run(core: EngineCore, tokenizer: Tokenizer, asked: list[Case], tokens: int, salt: str, streams: int = 0) -> Rate:
    """Run chats, `streams` of them at a time, or all."""
    requests = []
    for index, case in enumerate(asked):
        chat = f"<|im_start|>user\n{case.prompt}<|im_end|>\n<|im_start|>assistant\n"
        params = SamplingParams(**{"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True, **case.sampling})
        request = GenerateRequest(
            request_id=str(index),
            prompt_token_ids=tuple(tokenizer.encode(chat)),
            sampling=params,
            cache_salt=salt,
            prediction=tuple(tokenizer.encode(case.prediction)) if case.prediction else (),
        )
        requests.append(request)
    return run_requests(core, requests, [case.grammar for case in asked], streams)


def run_requests(
    core: EngineCore,
    asked: list[GenerateRequest],
    grammars: Iterable[Compiled | None] = itertools.repeat(None),
    streams: int = 0,
) -> Rate:
    """Run requests, whose ids are their numbers, all at the same time; or `streams` of them, where the next one follows
    each that ends. The rate is then that while there are so many: a request that is slower does not decide it."""
    runner = core.runner
    waiting = deque(enumerate(zip(asked, grammars, strict=False)))

    def add_next() -> None:
        index, (request, grammar) = waiting.popleft()
        prompt, params = request.prompt_token_ids, request.sampling
        matcher = Matcher(runner.eos_token_ids, grammar) if grammar is not None else None
        state = SamplerState(
            params, prompt, runner.eos_token_ids, params.seed or 0, matcher, runner.vocab_size, runner.device
        )
        core.add(Sequence(request=request, sampler=state, rank=index, arrival=time.monotonic(), tokens=list(prompt)))

    first = streams or len(asked)
    for _ in range(first):
        add_next()
    answers: list[list[int]] = [[] for _ in asked]
    started, processor, steps, before, left = 0.0, 0.0, 0, 0, len(asked)
    rate: Rate | None = None

    def measured() -> Rate:
        elapsed, used = time.monotonic() - started, time.process_time() - processor
        return Rate(answers, elapsed, used, steps, sum(map(len, answers)) - before)

    while core.busy:
        steps += 1
        for name, delta in core.step():
            assert isinstance(delta, Delta), delta
            answers[int(name)] += delta.token_ids
            if delta.finish_reason is not None:
                left -= 1
                if waiting:
                    add_next()
        if not started and all(answers[:first]):
            started, processor, steps = time.monotonic(), time.process_time(), 0
            before = sum(map(len, answers))
        if streams and started and rate is None and left < streams:
            rate = measured()
    assert started, "not all streams had a token at the same time"
    return rate or measured()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=Settings.model_fields["model"].default)
    parser.add_argument(
        "--modes", nargs="+", default=["ngram", "suffix"], choices=["ngram", "suffix", "draft", "eagle3"]
    )
    parser.add_argument("--draft-model", default="", help="folder, for the mode draft")
    parser.add_argument("--head", default="", help="folder, for the mode eagle3")
    parser.add_argument("--workloads", nargs="+", default=["edit", "predicted", "story"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--draft-tokens", type=int, default=EmbeddedConfig(model="").speculative_tokens)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--quantization", default="none", choices=["none", "int8"])
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--isa", default="auto", choices=get_args(CpuIsa), help="instruction set of the CPU")
    parser.add_argument("--show", action="store_true", help="print the answers")
    options = parser.parse_args()
    settings = Settings()
    folder = resolve_model(options.model, settings.cache_dir)
    tokenizer = Tokenizer.load(Path(folder))
    threads = compute_threads(options.threads)
    torch.set_num_threads(threads)

    models = {"draft": options.draft_model}
    if "eagle3" in options.modes:
        models["eagle3"] = options.head or str(resolve_head(options.model))

    def core(mode: str) -> EngineCore:
        return core_of(
            folder,
            settings,
            max(options.streams),
            1024,
            speculative=mode,
            speculative_model=models.get(mode, ""),
            speculative_tokens=options.draft_tokens,
            quantization=options.quantization,
            threads=threads,
            device=options.device,
            cpu_isa=options.isa,
        )

    cores = {mode: core(mode) for mode in ("none", *options.modes)}
    gc.freeze()  # as a server does: to walk the engines takes the time of many steps
    runner = cores["none"].runner
    print(
        f"{folder.name} {options.quantization}, {runner.compute_path} {runner.instruction_set}, {threads} threads,"
        f" load {os.getloadavg()[0]:.1f}"
    )
    print("workload   streams  mode    tok/s  repeats  tokens/step  accepted   same  time x  processor x  (least)")
    for workload, streams in itertools.product(options.workloads, options.streams):
        rates: dict[str, list[Rate]] = {mode: [] for mode in cores}
        repeats: list[float] = []
        before = {mode: drafted(cores[mode]) for mode in cores}
        with torch.inference_mode():
            for repeat in range(options.repeats):
                asked = cases(workload, streams * options.turns, repeat)
                for mode, engine in cores.items():
                    salt = f"{workload} {streams} {repeat}"
                    rates[mode].append(run(engine, tokenizer, asked, options.tokens, salt, streams))
                    same = rates[mode][-1].answers == rates["none"][-1].answers
                    assert same or options.device == "cuda", "speculation changed an answer"
                answers = rates["none"][-1].answers
                repeats += [repeated(case, answer, tokenizer) for case, answer in zip(asked, answers, strict=True)]
                if options.show:
                    for case, answer in zip(asked, answers, strict=True):
                        print(f"--- {case.prompt}\n--- {tokenizer.decode(answer)}")
        for mode, found in rates.items():
            pairs = list(zip(found, rates["none"], strict=True))
            # Per token: on a GPU answers may differ, and so their lengths.
            times = [rate.speed / plain.speed for rate, plain in pairs]
            work = [rate.tokens / rate.processor * plain.processor / plain.tokens for rate, plain in pairs]
            speed = statistics.median(rate.speed for rate in found)
            length = statistics.median(rate.tokens / rate.steps / streams for rate in found)
            new, right = (now - old for now, old in zip(drafted(cores[mode]), before[mode], strict=True))
            share = f"{right / new:8.0%}" if new else "       -"
            equal = [a == b for rate, plain in pairs for a, b in zip(rate.answers, plain.answers, strict=True)]
            print(
                f"{workload:10} {streams:7} {mode:7} {speed:6.1f} {statistics.mean(repeats):8.0%} {length:12.2f}"
                f"  {share}  {statistics.mean(equal):5.0%}  {statistics.median(times):6.2f}"
                f"  {statistics.median(work):11.2f}  ({min(work):.2f})",
                flush=True,
            )


def drafted(core: EngineCore) -> tuple[int, int]:
    stats = core.stats().spec_decoding_stats
    return (stats.num_draft_tokens, stats.num_accepted_tokens) if stats is not None else (0, 0)


if __name__ == "__main__":
    main()
