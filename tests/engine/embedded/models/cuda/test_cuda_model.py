"""The GPU's model without a GPU, whole and in float32.

It generates transformers' tokens, however steps are cut, prepared ahead, replayed or preempted. `test_cuda_engine`
tests the same on a GPU, whose roundings forbid such exact comparisons.
"""

import random
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

if torch.cuda.is_available():
    pytest.skip("test_cuda_engine runs the model on the GPU", allow_module_level=True)

from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from engine.embedded.models.cuda import graph_sizes
from engine.embedded.models.runner import StepInput
from engine.embedded.sampling.sampler import Sampler
from engine.embedded.sampling.state import SamplerState
from engine.embedded.sequence import Sequence
from engine.types import Delta, GenerateRequest, SamplingParams, TokenLogprobs
from tests.support import fake_flashinfer
from tests.support.cuda import OPTIONS, FixedMask, cuda_runner, interpreter, save  # noqa: F401 - fixtures

pytestmark = pytest.mark.usefixtures("cuda_runner")

OUTPUT = 4
LENGTHS = (13, 4, 1, 5, 10)
"""Of prompts: they end before, on and after the ends of blocks of 16 tokens, and the shortest fit a graph of a step."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), 0.15)


@pytest.fixture(scope="module")
def tame(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose attention and logits are as flat as a trained model's.

    The other model makes roundings several times as large.
    """
    return save(tmp_path_factory.mktemp("tame"), 0.06)


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    rng = random.Random(0)
    drawn = [[rng.randrange(2, 64) for _ in range(length)] for length in LENGTHS]
    drawn[-1][:9] = drawn[0][:9]  # two blocks that one may take from the other
    return drawn


@torch.inference_mode()
def logprobs_of(model: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    """Of what follows each token: [tokens, vocab]."""
    return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


@pytest.fixture(scope="module")
def expected(reference: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    outputs = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(OUTPUT):
            tokens.append(int(logprobs_of(reference, tokens)[-1].argmax()))
        outputs.append(tokens[len(prompt) :])
    return outputs


@dataclass
class Run:
    """What a core said to each prompt, how often it preempted one, and what its steps were."""

    deltas: list[list[Delta]]
    preemptions: int
    kinds: set[str]

    @property
    def tokens(self) -> list[list[int]]:
        return [[token for delta in deltas for token in delta.token_ids] for deltas in self.deltas]

    @property
    def logprobs(self) -> list[list[TokenLogprobs]]:
        return [[entry for delta in deltas for entry in delta.logprobs] for deltas in self.deltas]

    @property
    def cached(self) -> int:
        """Tokens that were in the cache when prompts came."""
        return sum(deltas[0].prompt.cached_tokens for deltas in self.deltas if deltas[0].prompt is not None)


def run(
    folder: Path,
    prompts: list[list[int]],
    sampling: dict[str, Any] | list[dict[str, Any]] | None = None,
    masks: dict[int, set[int]] | None = None,
    **options: Any,
) -> Run:
    """All prompts at once, to their end; nothing may be held afterwards. `masks`: the ids that some of them allow."""
    core = EngineCore(EmbeddedConfig(model=str(folder), **{**OPTIONS, **options}), lambda _: None)
    forward, kinds = core.runner.forward, set()

    def note(step: StepInput) -> torch.Tensor:
        lengths = step.lengths
        graph = core.runner.graph_of(step)  # type: ignore[attr-defined]
        how = "eager" if graph is None else "graph"
        kinds.add(how if graph is None else graph.kind.name)
        kinds.update((how, f"{how}, {'prompts' if min(lengths) > 1 else 'decodes' if max(lengths) == 1 else 'mixed'}"))
        if not step.rows:
            kinds.add(f"{how}, nothing sampled")
        return forward(step)

    core.runner.forward = note
    for index, prompt in enumerate(prompts):
        own = sampling[index] if isinstance(sampling, list) else sampling or {}
        params = SamplingParams(**{"max_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True, **own})
        request = GenerateRequest(request_id=str(index), prompt_token_ids=tuple(prompt), sampling=params)
        matcher: Any = FixedMask(masks[index]) if masks and index in masks else None
        state = SamplerState(
            params,
            prompt,
            core.runner.eos_token_ids,
            params.seed or 0,
            matcher,
            core.runner.vocab_size,
            core.runner.device,
        )
        logprobs = None if params.prompt_logprobs is None else [None]
        core.add(
            Sequence(
                request=request, sampler=state, rank=0.0, arrival=0.0, tokens=list(prompt), prompt_logprobs=logprobs
            )
        )
    deltas: dict[str, list[Delta]] = {}
    while core.busy:
        for request_id, delta in core.step():
            assert isinstance(delta, Delta), delta.__cause__
            deltas.setdefault(request_id, []).append(delta)
    assert core.stats().kv_cache_stats.used_num_blocks == 0
    return Run([deltas[str(index)] for index in range(len(prompts))], core.scheduler.preemptions, kinds)


@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        pytest.param({"overlap_scheduler": "off"}, {"eager, mixed", "graph, decodes"}, id="one step after the other"),
        pytest.param({}, {"eager, mixed", "graph, decodes"}, id="usual"),
        pytest.param({"enable_cuda_graphs": False}, {"eager, decodes"}, id="no graphs"),
        pytest.param({"enable_block_reuse": False}, set(), id="no reuse"),
        pytest.param({"num_blocks": 11, "kv_block_size": 2}, set(), id="preempted"),
        pytest.param(
            {"max_num_tokens": 5}, {"eager, nothing sampled", "graph, mixed"}, id="chunks that sample nothing"
        ),
        pytest.param({"max_num_tokens": 3}, {"graph, nothing sampled"}, id="graphs that sample nothing"),
    ],
)
def test_tokens_are_those_of_transformers(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], options: dict[str, Any], kinds: set[str]
) -> None:
    found = run(folder, prompts, **options)
    assert found.tokens == expected
    assert kinds <= found.kinds
    assert (found.preemptions > 0) == ("num_blocks" in options)
    assert (found.cached > 0) == options.get("enable_block_reuse", True)


@pytest.fixture
def chunk_graphs(cuda_runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """A graph for every step, in which the tokens of a chunk read its keys together."""
    monkeypatch.setattr(graph_sizes, "SHORT_PROMPT", 24)
    monkeypatch.setattr(graph_sizes, "CHUNKS", (8, 16))
    monkeypatch.setattr(cuda_runner, "_FEW_READ", 0)


@pytest.mark.usefixtures("chunk_graphs")
@pytest.mark.parametrize(
    ("options", "kinds"),
    [
        pytest.param({}, {"graph, mixed", "chunks"}, id="usual"),
        pytest.param({"max_num_tokens": 5}, {"graph, nothing sampled"}, id="chunks that sample nothing"),
        pytest.param({"num_blocks": 11, "kv_block_size": 2}, set(), id="preempted"),
    ],
)
def test_tokens_by_graphs_of_chunks_are_those_of_transformers(
    folder: Path, prompts: list[list[int]], expected: list[list[int]], options: dict[str, Any], kinds: set[str]
) -> None:
    found = run(folder, prompts, **options)
    assert found.tokens == expected
    assert kinds <= found.kinds and "eager" not in found.kinds


@pytest.fixture
def prompt_graphs(cuda_runner: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    """Graphs for steps of prompts that compute the logits of few rows."""
    monkeypatch.setattr(graph_sizes, "LAUNCH_SECONDS", 1.0)
    monkeypatch.setattr(graph_sizes, "PROMPTS", (8, 12, 24))


@pytest.mark.usefixtures("prompt_graphs")
@pytest.mark.parametrize(
    ("options", "kind"),
    [
        pytest.param({}, "chunks", id="usual"),
        pytest.param({}, "beside", id="decodes apart"),
        pytest.param({"overlap_scheduler": "off"}, "beside", id="one step after the other"),
        pytest.param({"max_num_tokens": 11}, "beside", id="chunks that sample nothing"),
        pytest.param({"num_blocks": 11, "kv_block_size": 2}, "chunks", id="preempted"),
    ],
)
def test_tokens_by_graphs_of_prompts_are_those_of_transformers(
    folder: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    options: dict[str, Any],
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "beside":
        monkeypatch.setattr(graph_sizes, "BESIDE_TOKENS", 8)
        monkeypatch.setattr("engine.embedded.models.cuda.group_attention.PROGRAMS", 1)
    found = run(folder, prompts, **options)
    assert found.tokens == expected
    assert "eager" not in found.kinds and kind in found.kinds


@pytest.mark.parametrize(
    ("sampling", "options"),
    [
        pytest.param({"frequency_penalty": -0.4, "max_tokens": 9}, {"max_batch_size": 6}, id="penalties"),
        pytest.param(
            {"max_tokens": 12},
            {"speculative": "ngram", "speculative_min_speedup": 0.0, "speculative_min_match": 1},
            id="drafts",
        ),
    ],
)
def test_graphs_of_prompts_change_nothing(
    folder: Path,
    prompts: list[list[int]],
    sampling: dict[str, Any],
    options: dict[str, Any],
    request: pytest.FixtureRequest,
) -> None:
    """Not what counts towards penalties, nor which drafted tokens are right."""
    asked = [prompt * 2 for prompt in prompts]
    plain = run(folder, asked, sampling, **options)
    request.getfixturevalue("prompt_graphs")
    found = run(folder, asked, sampling, **options)
    assert "eager" in plain.kinds and "eager" not in found.kinds
    assert found.tokens == plain.tokens
    assert sum(delta.draft_tokens for deltas in found.deltas for delta in deltas) > 0 or "speculative" not in options


@pytest.mark.usefixtures("prompt_graphs")
def test_more_logits_than_a_graph_of_prompts_computes_are_computed_without(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """A sequence whose prompt is not reported on has the same log-probabilities beside others that are."""
    sampling = [{"logprobs": 1, "prompt_logprobs": 1 if index == 0 else None} for index in range(len(prompts))]
    found, plain = run(folder, prompts, sampling), run(folder, prompts, {"logprobs": 1})
    assert found.tokens == plain.tokens == expected
    assert "eager" in found.kinds and "eager" not in plain.kinds
    for mine, theirs in zip(found.logprobs, plain.logprobs, strict=True):
        assert [entry[0].logprob for entry in mine] == pytest.approx([entry[0].logprob for entry in theirs], abs=1e-4)


@pytest.mark.usefixtures("chunk_graphs")
@pytest.mark.parametrize("dtype", ["auto", "fp8"])
def test_decodes_apart_from_chunks_change_nothing(
    tame: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    cuda_runner: ModuleType,  # noqa: F811
    dtype: str,
) -> None:
    together = run(tame, prompts, kv_cache_dtype=dtype)
    monkeypatch.setattr(graph_sizes, "BESIDE_TOKENS", 8)
    monkeypatch.setattr("engine.embedded.models.cuda.group_attention.PROGRAMS", 1)
    found = run(tame, prompts, kv_cache_dtype=dtype)
    assert "beside" in found.kinds - together.kinds
    assert found.tokens == together.tokens


@pytest.mark.usefixtures("chunk_graphs")
@pytest.mark.parametrize(
    ("options", "waits"),
    [
        pytest.param({}, False, id="usual"),
        pytest.param({"enable_cuda_graphs": False}, True, id="no graphs"),
        pytest.param({"enable_chunked_prefill": False}, True, id="whole prompts"),
    ],
)
def test_steps_are_small_until_flashinfer_is_compiled(
    folder: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    cuda_runner: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    waits: bool,
) -> None:
    """Where they cannot be small, the start waits."""
    steps: list[tuple[bool, int]] = []

    class Late(fake_flashinfer.Kernels):
        @property
        def ready(self) -> bool:  # type: ignore[override]
            return len(steps) >= 1

    def forward(runner: Any, step: StepInput) -> torch.Tensor:
        steps.append((runner.most_tokens is None, len(step.tokens)))
        return compute(runner, step)

    compute = cuda_runner.CudaRunner.forward
    monkeypatch.setattr(cuda_runner, "FlashInferKernels", Late)
    monkeypatch.setattr(graph_sizes, "SHORT_PROMPT", 6)
    monkeypatch.setattr(cuda_runner.CudaRunner, "forward", forward)
    assert run(folder, prompts, **options).tokens == expected
    small = [size for plans, size in steps if not plans]
    assert small == ([] if waits else [6])
    assert max(size for plans, size in steps if plans) > 6


def test_sequences_that_were_expected_are_computed_as_others_are(
    folder: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    cuda_runner: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nor does one matter that was expected in a slot and did not come."""
    seen: set[int] = set()

    def forward(runner: Any, step: StepInput) -> torch.Tensor:
        for slot, admission, tables in zip(step.slots, step.admissions, step.tables, strict=True):
            if admission not in seen:
                runner.expect(slot, -2, [[1, 0, 1, 0]])
                runner.expect(slot, admission, tables)
                seen.add(admission)
        return compute(runner, step)

    compute = cuda_runner.CudaRunner.forward
    monkeypatch.setattr(cuda_runner.CudaRunner, "forward", forward)
    assert run(folder, prompts).tokens == expected
    assert len(seen) >= len(prompts)


@pytest.mark.parametrize("bare", [True, False])
def test_flashinfer_is_imported_after_the_graphs_unless_it_may_have_to_be_compiled(
    folder: Path,
    prompts: list[list[int]],
    expected: list[list[int]],
    cuda_runner: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    bare: bool,
) -> None:
    begun: list[str] = []

    class Noted(fake_flashinfer.Kernels):
        def start(self) -> None:
            begun.append("start")

    def capture(*arguments: Any) -> Any:
        if begun[-1:] != ["capture"]:
            begun.append("capture")
        return captured(*arguments)

    captured = cuda_runner.capture
    monkeypatch.setattr(cuda_runner, "capture", capture)
    monkeypatch.setattr(cuda_runner, "FlashInferKernels", Noted)
    monkeypatch.setattr(cuda_runner, "is_bare", lambda: bare)
    assert run(folder, prompts).tokens == expected
    assert begun == (["start", "capture", "start"] if bare else ["capture", "start"])


@pytest.mark.usefixtures("chunk_graphs")
@pytest.mark.parametrize(("dtype", "error"), [("auto", 1e-4), ("fp8", 0.02)])
def test_logprobs_by_graphs_of_chunks_are_those_of_other_steps(
    tame: Path, prompts: list[list[int]], dtype: str, error: float
) -> None:
    """With eight bits not quite: a prompt's first steps otherwise see their own keys before they are rounded."""
    sampling = {"logprobs": 3, "prompt_logprobs": 2}
    found, other = (
        run(tame, prompts[:3], sampling, kv_cache_dtype=dtype, max_num_tokens=7, enable_cuda_graphs=graphs)
        for graphs in (True, False)
    )
    assert "eager" not in found.kinds and "graph" not in other.kinds
    assert found.tokens == other.tokens
    for mine, theirs in zip(found.logprobs, other.logprobs, strict=True):
        for one, another in zip(mine, theirs, strict=True):
            assert one[0].logprob == pytest.approx(another[0].logprob, abs=error)


@pytest.mark.parametrize("dtype", ["auto", "fp8"])
@pytest.mark.parametrize("overlap", ["on", "off"])
def test_shared_prefixes_change_nothing(
    tame: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    cuda_runner: ModuleType,  # noqa: F811
    dtype: str,
    overlap: str,
) -> None:
    """Sequences with one of two prefixes, or with none, which come and go."""
    beginnings = [prompts[0][:9], prompts[4][1:10]]
    asked = [[*beginnings[i % 2], *prompts[0][i : i + 1 + i % 3]] for i in range(10)] + prompts[1:4]
    options = {"max_num_tokens": 16, "kv_cache_dtype": dtype, "overlap_scheduler": overlap, "max_batch_size": 6}
    sampling = [{"max_tokens": 3 + i % 5, "logprobs": 1} for i in range(len(asked))]
    plain = run(tame, asked, sampling, **options)
    monkeypatch.setattr(graph_sizes, "LEAST_SEQUENCES", 2)
    monkeypatch.setattr("engine.embedded.models.cuda.prefixes.LEAST_SEQUENCES", 2)
    monkeypatch.setattr("engine.embedded.models.cuda.prefixes.LEAST_TOKENS", 8)
    monkeypatch.setattr(cuda_runner, "LEAST_SAVED", 1)
    found = run(tame, asked, sampling, **options)
    assert "cascade" in found.kinds - plain.kinds
    assert found.tokens == plain.tokens
    for mine, theirs in zip(found.logprobs, plain.logprobs, strict=True):
        assert [entry[0].logprob for entry in mine] == pytest.approx([entry[0].logprob for entry in theirs], abs=1e-4)


def test_steps_run_where_they_read_least(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    cuda_runner: ModuleType,  # noqa: F811
) -> None:
    monkeypatch.setattr(graph_sizes, "SHORT_PROMPT", 24)
    monkeypatch.setattr(graph_sizes, "BESIDE_TOKENS", 16)
    monkeypatch.setattr("engine.embedded.models.cuda.group_attention.PROGRAMS", 2)
    options = OPTIONS | {"enable_chunked_prefill": False}  # FlashInfer is there from the start
    core = EngineCore(EmbeddedConfig(model=str(folder), **options), lambda _: None)

    def how(*sequences: tuple[int, int]) -> tuple[str, int]:
        starts, lengths = zip(*sequences, strict=True)
        step = StepInput([0] * sum(lengths), [], starts, lengths, [], [], [], [], [])
        graph = core.runner.graph_of(step)  # type: ignore[attr-defined]
        return ("eager", 0) if graph is None else (graph.kind.name, graph.size)

    assert how((0, 12)) == ("decodes", 16) and how(*[(100_000, 1)] * 4) == ("decodes", 4)
    assert how((5_000, 1), (5_000, 4)) == ("chunks", 16)
    assert how((5_000, 1), (5_000, 1), (5_000, 14)) == ("beside", 16)
    assert how((5_000, 1), (5_000, 1), (5_000, 5)) == ("chunks", 16)
    assert how((5_000, 1), (5_000, 15)) == ("chunks", 16), "few decodes are divided among programs"
    assert how((9_000, 1), (1_000, 1), (5_000, 14)) == ("chunks", 16), "and so is one that is longer than others"
    assert how((10_000, 20)) == ("chunks", 24) and how((10_000, 25)) == ("eager", 0)
    assert how((1_100_000, 20)) == ("chunks", 24) and how((1_100_000, 3), (1_100_000, 4)) == ("eager", 0)


def test_logprobs_are_those_of_transformers(
    folder: Path, prompts: list[list[int]], reference: LlamaForCausalLM
) -> None:
    """Of chunked prompts too, some of whose chunks sample nothing but are reported on."""
    found = run(folder, prompts[:2], {"logprobs": 3, "prompt_logprobs": 2}, max_num_tokens=7)
    for prompt, tokens, deltas, sampled in zip(prompts[:2], found.tokens, found.deltas, found.logprobs, strict=True):
        assert deltas[0].prompt is not None and deltas[0].prompt.logprobs is not None
        first, *reported = deltas[0].prompt.logprobs
        assert first is None and len(reported) == len(prompt) - 1 and len(sampled) == OUTPUT
        rows = logprobs_of(reference, prompt + tokens[:-1])
        for index, (row, token, entry) in enumerate(
            zip(rows, (prompt + tokens)[1:], [*reported, *sampled], strict=True)
        ):
            best = row.topk(2 if index < len(reported) else 3)
            assert (
                entry is not None and entry[0].token_id == token and entry[0].rank == 1 + int((row > row[token]).sum())
            )
            assert [item.token_id for item in entry[1:]] == best.indices.tolist()
            assert [item.logprob for item in entry] == pytest.approx(
                [row[token].item(), *best.values.tolist()], abs=1e-4
            )


def test_a_step_ahead_changes_nothing_of_what_is_drawn(
    folder: Path, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    sampling = {"temperature": 1.0, "top_p": 0.9, "seed": 7}
    ahead, after = (
        run(folder, prompts[:2], sampling, overlap_scheduler=overlap, max_num_tokens=7, max_batch_size=2)
        for overlap in ("on", "off")
    )
    assert ahead.tokens == after.tokens != expected[:2]


def test_requests_that_all_differ_get_the_tokens_of_the_reference(
    folder: Path, prompts: list[list[int]], reference: LlamaForCausalLM
) -> None:
    """Guided ones among them, which wait for their masks while the others do not; the kernels are tried before."""
    masks = {0: {5, 6, 40}, 3: set(range(0, 64, 5))}
    sampling: list[dict[str, Any]] = [
        {},
        {"temperature": 1.0, "seed": 3, "top_p": 0.9},
        {"frequency_penalty": 1.5, "logprobs": 2},
        {"temperature": 1.3, "seed": 4, "presence_penalty": 1.0},
        {"min_tokens": 3, "ignore_eos": False, "logit_bias": {1: 50.0}},
    ]
    found = run(folder, prompts, sampling, masks)
    for index, (prompt, own, tokens) in enumerate(zip(prompts, sampling, found.tokens, strict=True)):
        params = SamplingParams(**{"max_tokens": OUTPUT, "temperature": 0.0, "ignore_eos": True, **own})
        matcher: Any = FixedMask(masks[index]) if index in masks else None
        state = SamplerState(params, prompt, (1,), params.seed or 0, matcher, 64, torch.device("cpu"))
        for token in tokens:
            with torch.inference_mode():
                logits = reference(torch.tensor([state.tokens])).logits[0, -1:]
                (expected,) = Sampler(64, torch.device("cpu")).sample(logits, [state])
            assert (token,) == expected.token_ids, f"request {index}, token {state.position}"
            state.accept(token)
    assert len(found.tokens[4]) == OUTPUT and found.tokens[4][-1] == 1


@pytest.mark.parametrize(
    ("options", "error"),
    [
        pytest.param({"kv_cache_dtype": "fp8"}, 0.025, id="cache"),
        pytest.param({"quantization": "fp8"}, 0.04, id="weights"),
        pytest.param(
            {"kv_cache_dtype": "fp8", "quantization": "fp8", "max_num_tokens": 7},
            0.05,
            id="both, chunks that sample nothing",
        ),
    ],
)
def test_eight_bits_are_near_transformers(
    tame: Path, prompts: list[list[int]], options: dict[str, Any], error: float
) -> None:
    """The mean error of the log-probabilities of tokens that were taken and of the likeliest ones.

    The limits are about twice the measured error.
    """
    found = run(tame, prompts[:2], {"logprobs": 3}, max_batch_size=2, **options)
    reference, errors = LlamaForCausalLM.from_pretrained(tame).eval(), []
    for prompt, tokens, entries in zip(prompts[:2], found.tokens, found.logprobs, strict=True):
        rows = logprobs_of(reference, prompt + tokens[:-1])[len(prompt) - 1 :]
        errors += [
            abs(item.logprob - row[item.token_id].item())
            for row, entry in zip(rows, entries, strict=True)
            for item in entry
        ]
    assert len(errors) == 2 * OUTPUT * 4
    assert 1e-4 < sum(errors) / len(errors) < error
