"""The host's time for each step, and what speculation gains on a fast GPU, which is imagined.

    python -m benchmarks.host [--modes ngram suffix eagle3] [--streams 1 16 64] [--step 0.5] [--row 4] [--repeats 8]

The device is imagined: a step takes `--step` milliseconds of it, `--several` more if a sequence has several rows, and
`--row` microseconds for each row; the host goes on meanwhile, and results come when they would be there. It computes
known texts: `own`, whose words are as frequent as in any text, and `edit`, which repeats most of its prompt. Scheduler,
plans, drafts and their lookup are the engine's own, and a head drafts a right token in `--right` of cases.
`--step 0 --row 0` shows the host alone. Engines without and with speculation run in turns; ratios are medians over the
repetitions, each against the plain engine in the same one. Launching kernels and copying results is not imagined in
detail, so a GPU's steps take the host longer.
"""

import argparse
import gc
import itertools
import random
import statistics
import time
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.speculation import Rate, run_requests
from engine.checkpoints.store import resolve_head, resolve_model
from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.embedded.kv.layout import Attends, LayerGroup
from engine.embedded.kv.memory import KvMemory
from engine.embedded.loaded_model import LoadedModel
from engine.embedded.models.heads import ROUND_DRAFTS, ROUND_TOKENS, HeadDraft, HeadStep, RoundStart
from engine.embedded.models.runner import PendingTokens, StepInput
from engine.embedded.sampling.sampler import Drawn, Sampled, Sampler
from engine.embedded.speculation.create import create_speculator
from engine.types import GenerateRequest, SamplingParams
from server.settings import Settings

VOCABULARY, CONTEXT, BLOCK = 49152, 1024, 32
PROMPT, OUTPUT, TURNS = 200, 200, 3
LAUNCH = 60e-6
"""Seconds in which the host copies a step's inputs and launches its graph."""
READ, READ_EACH, FURTHER = 300e-6, 3e-6, 60e-6
"""Seconds in which a head begins to read, reads each position and drafts a token, and drafts each further one."""


class Device:
    """When it is done with all that it was given."""

    def __init__(self) -> None:
        self._done = 0.0

    def run(self, seconds: float) -> float:
        """Return when a computation is done that begins behind all others."""
        self._done = max(self._done, time.monotonic()) + seconds
        return self._done


def wait(until: float) -> None:
    while time.monotonic() < until:
        pass


class ImaginedSampler(Sampler):
    def __init__(self, runner: "ImaginedRunner") -> None:
        super().__init__(VOCABULARY, torch.device("cpu"))
        self._runner = runner

    def draw(self, logits: torch.Tensor, states: Any, slots: Many[int] = (), rows: Many[int] | None = None) -> Drawn:
        return _Later(self._runner, rows)

    def draws_alone(self, _: Any) -> bool:
        return True


class _Later(Drawn):
    """The tokens of the runner's last step, once that is done."""

    def __init__(self, runner: "ImaginedRunner", rows: Many[int] | None) -> None:
        super().__init__([runner.text[position + 1] for position in runner.positions])
        self._until, self._first = runner.done, rows

    @property
    def tokens(self) -> torch.Tensor:
        return torch.empty(0)  # which nobody looks at

    def results(self) -> list[Sampled]:
        wait(self._until)
        tokens = self.arrived()
        if self._first is None:
            return [Sampled((token,)) for token in tokens]
        self.ahead = tokens
        return [Sampled((tokens[row],)) for row in self._first]


class ImaginedHead:
    """A `HeadRunner` that knows the text."""

    def __init__(self, runner: "ImaginedRunner") -> None:
        self._runner, self._rng = runner, random.Random(1)
        self.rounds = ImaginedRounds(runner)

    def draft(self, step: HeadStep, limits: Many[int], least: float) -> list[HeadDraft]:
        wait(self._runner.run(READ + READ_EACH * len(step.tokens) + FURTHER * (max(limits) - 1)))
        drafts, end = [], 0
        for length, limit in zip(step.lengths, limits, strict=True):
            end += length
            following = self._runner.text[step.positions[end - 1] + 2 :][:limit]
            right = [self._rng.random() < self._runner.right for _ in following]
            tokens = [token if known else 0 for token, known in zip(following, right, strict=True)]
            drafts.append(HeadDraft(tokens, [0.6 if known else 0.4 for known in right]))
        return drafts


class ImaginedRounds:
    """`DraftRounds` that know the text. The host waits for them at once: it has nothing else to do meanwhile."""

    most_sequences = 16

    def __init__(self, runner: "ImaginedRunner") -> None:
        self._runner, self._rng = runner, random.Random(2)
        self._taken: list[RoundStart] = []

    def goes_on(self, starts: Many[RoundStart]) -> bool:
        return self._taken == list(starts)

    def run(self, starts: Many[RoundStart], _: HeadStep, rounds: int) -> torch.Tensor:
        runner, places = self._runner, [start.position for start in starts]
        wait(time.monotonic() + LAUNCH)
        wait(runner.run(rounds * runner.round * (runner.step + runner.row * len(starts))))
        found = np.zeros((rounds, len(starts), 1 + ROUND_TOKENS), dtype=np.int32)
        for each in found:
            for row, place in enumerate(places):
                right = next((n for n in range(ROUND_DRAFTS) if self._rng.random() >= runner.right), ROUND_DRAFTS)
                each[row, 0], each[row, 1:] = right + 1, runner.text[place + 1 : place + 1 + ROUND_TOKENS]
                places[row] += right + 1
        return torch.from_numpy(found)

    def note_taken(self, starts: Many[RoundStart]) -> None:
        self._taken = list(starts)


class ImaginedRunner(PendingTokens):
    """A `ModelRunner` on no device: `text` is what every sequence says, from the first token of its prompt on."""

    dtype, compute_path, instruction_set = torch.float32, "imagined", ""
    vocab_size, context_length, eos_token_ids, takes_images = VOCABULARY, CONTEXT, (2,), None
    graph_tokens = 256

    def __init__(self, device: Device, streams: int, options: argparse.Namespace, hidden: bool) -> None:
        super().__init__(streams, torch.device("cpu"))
        self.device = torch.device("meta")
        self.run, self.right, self.round = device.run, options.right, options.round
        self.step, self.several, self.row = options.step * 1e-3, options.several * 1e-3, options.row * 1e-6
        self.groups = [LayerGroup(None, (0,), streams * CONTEXT // BLOCK)]
        self.memory = KvMemory("imagined", Attends((None,), 1, 1), [torch.zeros(1, 1)])
        self.sampler = ImaginedSampler(self)
        self.text: list[int] = []
        self.positions: list[int] = []
        self.done = 0.0
        self._hidden = torch.zeros((CONTEXT, 1)) if hidden else None

    def load_head(self, *_: Any) -> ImaginedHead:
        return ImaginedHead(self)

    def remember(self, slots: Many[int], tokens: Any) -> None:
        pass

    def forward(self, step: StepInput) -> torch.Tensor:
        count = len(step.tokens)
        np.array((step.tokens, step.positions), dtype=np.int32)
        self.positions = [step.positions[row] for row in step.rows]
        wait(time.monotonic() + LAUNCH)
        self.done = self.run(self.step + self.row * count + self.several * (count > len(step.lengths)))
        if self._hidden is not None:
            self.hidden = self._hidden if count <= CONTEXT else torch.zeros((count, 1))
        return torch.empty((len(step.rows), 1))


def text_of(workload: str, seed: int) -> list[int]:
    """Return a prompt and what follows it."""
    rng = np.random.default_rng(seed)
    if workload == "own":
        return (rng.zipf(1.3, CONTEXT) % VOCABULARY).tolist()
    text: list[int] = rng.integers(0, VOCABULARY, PROMPT).tolist()
    place = PROMPT // 10
    while len(text) < CONTEXT:
        if rng.random() < 0.06:  # another token in place of none, one or two
            text.append(int(rng.integers(0, VOCABULARY)))
            place += int(rng.integers(0, 3))
        text.append(text[place % PROMPT])
        place += 1
    return text


def core_of(mode: str, device: Device, options: argparse.Namespace, folder: Path, head: str) -> EngineCore:
    streams = max(options.streams)
    config = EmbeddedConfig(
        model=str(folder),
        max_batch_size=streams,
        max_num_tokens=4096,
        num_blocks=streams * CONTEXT // BLOCK,
        kv_block_size=BLOCK,
        speculative=mode,  # type: ignore[arg-type]
        speculative_model=head if mode == "eagle3" else "",
    )
    runner = ImaginedRunner(device, streams, options, hidden=mode == "eagle3")
    return EngineCore(config, lambda _: None, LoadedModel(runner, create_speculator(config, runner)))


@torch.inference_mode()
def run(core: EngineCore, text: list[int], streams: int, salt: str) -> Rate:
    assert isinstance(core.runner, ImaginedRunner)
    core.runner.text = text
    params = SamplingParams(max_tokens=OUTPUT, temperature=0.0, ignore_eos=True)
    prompt = tuple(text[:PROMPT])
    requests = [
        GenerateRequest(request_id=str(index), prompt_token_ids=prompt, sampling=params, cache_salt=f"{salt} {index}")
        for index in range(streams * TURNS)
    ]
    rate = run_requests(core, requests, streams=streams)
    assert all(answer == text[PROMPT : PROMPT + OUTPUT] for answer in rate.answers), "a draft changed an answer"
    return rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--modes", nargs="+", default=["ngram", "suffix", "eagle3"], choices=["ngram", "suffix", "eagle3"]
    )
    parser.add_argument("--workloads", nargs="+", default=["own", "edit"], choices=["own", "edit"])
    parser.add_argument("--streams", nargs="+", type=int, default=[1, 16, 64])
    parser.add_argument("--step", type=float, default=0.5)
    parser.add_argument("--several", type=float, default=0.0)
    parser.add_argument("--row", type=float, default=4.0)
    parser.add_argument("--right", type=float, default=0.6)
    parser.add_argument("--round", type=float, default=1.7, help="time of a round of drafts, in steps")
    parser.add_argument("--repeats", type=int, default=8)
    options = parser.parse_args()
    settings = Settings()
    model = Settings.model_fields["model"].default
    folder, device = Path(resolve_model(model, settings.cache_dir)), Device()
    head = str(resolve_head(model)) if "eagle3" in options.modes else ""
    cores = {mode: core_of(mode, device, options, folder, head) for mode in ("none", *options.modes)}
    gc.freeze()  # as a server does
    print("workload  streams  mode       tok/s  tokens/step  ms/step  time x  (least)")
    for workload, streams in itertools.product(options.workloads, options.streams):
        rates: dict[str, list[Rate]] = {mode: [] for mode in cores}
        for repeat in range(options.repeats):
            text = text_of(workload, repeat)
            for mode, core in cores.items():
                rates[mode].append(run(core, text, streams, f"{workload} {streams} {repeat}"))
        for mode, found in rates.items():
            times = [rate.speed / plain.speed for rate, plain in zip(found, rates["none"], strict=True)]
            print(
                f"{workload:8} {streams:8}  {mode:7} {statistics.median(rate.speed for rate in found):8.0f}"
                f" {statistics.median(rate.tokens / rate.steps / streams for rate in found):12.2f}"
                f" {statistics.median(rate.seconds / rate.steps for rate in found) * 1e3:8.3f}"
                f" {statistics.median(times):7.2f}  ({min(times):.2f})",
                flush=True,
            )


if __name__ == "__main__":
    main()
