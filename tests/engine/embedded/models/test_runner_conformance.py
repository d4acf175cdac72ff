"""Conformance of every model runner: from a `StepInput` it computes the logits of transformers' own forward, however
prompts are divided and steps are filled. The CUDA runner runs here in Triton's interpreter, where Triton is installed;
`cuda/test_cuda_engine.py` runs it on a GPU.
"""

import contextlib
import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM

from engine.config import EmbeddedConfig
from engine.embedded.models.runner import EmbeddingRows, ModelRunner, StepInput
from tests.support.steps import Part, last_rows, step_of
from tests.support.vision_models import BUILDERS

SIZE = 16
"""Tokens of a block: what all three runners take."""
SEQS = 4
VOCAB = 64
TEXT = {
    "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 64,
    "vocab_size": VOCAB, "max_position_embeddings": 128,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the Llama kind, of weights that bfloat16 holds."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**TEXT, initializer_range=0.15, tie_word_embeddings=False))
    path = tmp_path_factory.mktemp("llama")
    model.bfloat16().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(params=["torch", "native", "cuda", "cuda by chunks", "cuda without graphs"])
def load(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Construct the runner of this name for a folder."""
    kind = request.param
    if kind.startswith("cuda"):
        pytest.importorskip("triton", reason="Triton is not installed")
        if torch.cuda.is_available():
            pytest.skip("test_cuda_engine runs the model on the GPU")
        from tests.support import cuda  # noqa: PLC0415

        module = request.getfixturevalue(cuda.cuda_runner.__name__)
        runner_class = module.CudaRunner
        if kind == "cuda by chunks":  # all but decodes
            monkeypatch.setattr("engine.embedded.models.cuda.graph_sizes.SHORT_PROMPT", 64)
            monkeypatch.setattr("engine.embedded.models.cuda.graph_sizes._decodes", lambda _: [SEQS])
            monkeypatch.setattr(module, "_FEW_READ", 0)
    elif kind == "native":
        from engine.embedded.models.native.runner import NativeRunner as runner_class  # noqa: N813, PLC0415
    else:
        from engine.embedded.models.torch.runner import TorchRunner as runner_class  # noqa: N813, PLC0415

    def load(folder: Path, **options: Any) -> ModelRunner:
        settings = {
            "device": "cpu", "dtype": "float32", "num_blocks": 40, "kv_block_size": SIZE, "max_batch_size": SEQS,
            "threads": 1,
            "max_num_tokens": 64, "enable_cuda_graphs": kind in ("cuda", "cuda by chunks"),
        }  # fmt: skip
        runner: ModelRunner = runner_class(EmbeddedConfig(model=str(folder), **{**settings, **options}))
        return runner

    yield load


@pytest.fixture
def runner(load: Any, folder: Path) -> ModelRunner:
    loaded: ModelRunner = load(folder)
    return loaded


with contextlib.suppress(pytest.skip.Exception):  # without Triton
    from tests.support.cuda import cuda_runner, interpreter  # noqa: F401 - fixtures


def tokens_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(2, VOCAB) for _ in range(length)]


@torch.inference_mode()
def logits_of(reference: LlamaForCausalLM, tokens: list[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens])).logits[0]


def near(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(
        logits.float().cpu(), expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()), check_dtype=False
    )


A, B, C, D = tokens_of(40, 1), tokens_of(33, 2), tokens_of(17, 3), tokens_of(5, 4)
TABLES = [[3, 9, 1], [0, 4, 7], [12, 5], [30]]
"""Blocks of A, B, C and D."""


def part(index: int, start: int, length: int, sampled: int = 1) -> Part:
    return Part([A, B, C, D][index], TABLES[index], start, length, slot=index, sampled=sampled)


def test_a_runner_describes_itself(runner: ModelRunner) -> None:
    assert (runner.vocab_size, runner.context_length, runner.takes_images) == (VOCAB, 128, None)
    assert (runner.device.type, runner.dtype) == ("cpu", torch.float32)
    assert [(group.window, group.layers, group.num_blocks) for group in runner.groups] == [(None, (0, 1), 40)]
    [blocks] = runner.memory.blocks
    assert len(blocks) >= 40 and blocks[0].is_contiguous()


def test_warming_up_leaves_no_trace(runner: ModelRunner) -> None:
    assert all(
        not blocks[: group.num_blocks].any() for blocks, group in zip(runner.memory.blocks, runner.groups, strict=True)
    )


def test_prefill(runner: ModelRunner, reference: LlamaForCausalLM) -> None:
    near(runner.forward(step_of([part(0, 0, 40)])), logits_of(reference, A))


def test_several_prompts_in_one_step(runner: ModelRunner, reference: LlamaForCausalLM) -> None:
    logits = runner.forward(step_of([part(1, 0, 33), part(3, 0, 5), part(2, 0, 17)]))
    near(logits, torch.cat([logits_of(reference, tokens) for tokens in (B, D, C)]))


def test_drafted_tokens_are_computed_in_one_step_and_wrong_ones_written_over(
    runner: ModelRunner, reference: LlamaForCausalLM
) -> None:
    """Next to a decode, and to a prompt; the last two of three drafted tokens turn out to be others."""
    runner.forward(step_of([part(2, 0, 10), part(3, 0, 4)]))
    drafted = [*C[:12], 5, 6]
    both = step_of([part(3, 4, 1), Part(drafted, TABLES[2], 10, 4, slot=2, sampled=4), part(1, 0, 33)])
    expected = [logits_of(reference, D)[4:], logits_of(reference, drafted)[10:], logits_of(reference, B)]
    near(runner.forward(both), torch.cat(expected))
    near(runner.forward(step_of([part(2, 12, 5)])), logits_of(reference, C)[12:])


def test_only_the_rows_wanted_come_back_in_their_order(runner: ModelRunner, reference: LlamaForCausalLM) -> None:
    logits = runner.forward(step_of([part(1, 0, 33), part(3, 0, 5)], [37, 2, 32]))
    near(logits, torch.stack([logits_of(reference, D)[4], logits_of(reference, B)[2], logits_of(reference, B)[32]]))


def test_a_step_without_wanted_rows_writes_its_keys_and_values(
    runner: ModelRunner, reference: LlamaForCausalLM
) -> None:
    """The middle of a prompt: its keys and values are there afterwards."""
    assert runner.forward(step_of([part(0, 0, 24, sampled=0)], [])).shape == (0, VOCAB)
    near(runner.forward(step_of([part(0, 24, 16)])), logits_of(reference, A)[24:])


@pytest.mark.parametrize("cuts", [(16,), (1, 2, 31), (15, 16, 17), (39,), tuple(range(1, 40, 3))], ids=str)
def test_chunked_prefill(runner: ModelRunner, reference: LlamaForCausalLM, cuts: tuple[int, ...]) -> None:
    parts = [
        runner.forward(step_of([part(0, start, end - start, sampled=end == 40)])).clone()
        for start, end in pairwise((0, *cuts, 40))
    ]
    near(torch.cat(parts), logits_of(reference, A))


def test_decodes(runner: ModelRunner, reference: LlamaForCausalLM) -> None:
    """Of lengths in no order, each given its next token; they cross the ends of blocks at different steps."""
    begun = [10, 15, 14, 2]
    runner.forward(step_of([part(index, 0, length) for index, length in enumerate(begun)]))
    for step in range(3):
        logits = runner.forward(step_of([part(index, begun[index] + step, 1) for index in (2, 0, 3, 1)]))
        expected = [logits_of(reference, [A, B, C, D][index])[begun[index] + step] for index in (2, 0, 3, 1)]
        near(logits, torch.stack(expected))


def test_decodes_and_prompts_in_one_step(runner: ModelRunner, reference: LlamaForCausalLM) -> None:
    """Two decodes, a prompt that goes on and one that begins."""
    runner.forward(step_of([part(0, 0, 39), part(3, 0, 4), part(1, 0, 20)], []))
    parts = [part(0, 39, 1), part(3, 4, 1), part(1, 20, 13), part(2, 0, 17)]
    logits = runner.forward(step_of(parts, last_rows(parts)))
    near(logits, torch.stack([logits_of(reference, tokens)[-1] for tokens in (A, D, B, C)]))


def test_company_changes_nothing_but_roundings(runner: ModelRunner) -> None:
    alone = runner.forward(step_of([part(2, 0, 17)])).clone()
    runner.forward(step_of([part(0, 0, 30), part(3, 0, 4)], []))
    together = runner.forward(step_of([part(3, 4, 1), part(0, 30, 10), part(2, 0, 17)]))
    torch.testing.assert_close(together[-17:], alone, rtol=1e-4, atol=1e-4 * float(alone.abs().max()))


def test_a_slot_gets_another_sequence(runner: ModelRunner, reference: LlamaForCausalLM) -> None:
    """And then the first one in other blocks, as after a preemption."""
    runner.forward(step_of([part(0, 0, 40)]))
    other = Part(B, [20, 21, 22], 0, 33, slot=0)
    near(runner.forward(step_of([other])), logits_of(reference, B))
    again = Part(A, [33, 34, 35], 0, 39, slot=0)
    runner.forward(step_of([again]))
    near(runner.forward(step_of([again.changed(start=39, length=1)])), logits_of(reference, A)[39:])


def test_shared_blocks_are_read_by_both(runner: ModelRunner, reference: LlamaForCausalLM) -> None:
    runner.forward(step_of([part(0, 0, 32)], []))
    tail = tokens_of(6, 9)
    shared = Part([*A[:32], *tail], [*TABLES[0][:2], 18], 32, 6, slot=1)
    logits = runner.forward(step_of([part(0, 32, 8), shared]))
    near(logits[:8], logits_of(reference, A)[32:])
    near(logits[8:], logits_of(reference, shared.tokens)[32:])


def pending(step: StepInput, *rows: int) -> StepInput:
    """The same step, with the tokens of these rows, one for each sequence, not told but named by their slots."""
    tokens = list(step.tokens)
    for row in rows:
        tokens[row] = -1 - step.slots[row]
    return replace(step, tokens=tokens)


@torch.inference_mode()
def test_pending_tokens(runner: ModelRunner, reference: LlamaForCausalLM) -> None:
    """What was remembered for a slot is taken where the host names no token; some of a step may be known."""
    runner.forward(step_of([part(0, 0, 39), part(1, 0, 20), part(2, 0, 16)], []))
    runner.remember([0, 2], torch.tensor([A[39], C[16]]))
    step = step_of([part(2, 16, 1), part(1, 20, 1), part(0, 39, 1)])
    logits = runner.forward(pending(step, 0, 2))
    near(logits, torch.stack([logits_of(reference, C)[16], logits_of(reference, B)[20], logits_of(reference, A)[39]]))


@torch.inference_mode()
def test_greedy_steps_ahead_of_the_host(runner: ModelRunner, reference: LlamaForCausalLM) -> None:
    """What is sampled is remembered and taken by the next step, prompts among them: transformers' greedy tokens."""
    prompts = [A[:20], D[:4]]
    expected = []
    for prompt in prompts:
        tokens = list(prompt)
        for _ in range(5):
            tokens.append(int(logits_of(reference, tokens)[-1].argmax()))
        expected.append(tokens[len(prompt) :])
    parts = [Part(prompt, TABLES[index], 0, len(prompt), slot=index) for index, prompt in enumerate(prompts)]
    step = step_of(parts, last_rows(parts))
    found: list[list[int]] = []
    for number in range(5):
        sampled = runner.forward(step).argmax(dim=1)
        runner.remember([0, 1], sampled)
        found.append(sampled.tolist())
        parts = [
            Part([0] * 30, TABLES[index], len(prompt) + number, 1, slot=index) for index, prompt in enumerate(prompts)
        ]
        step = pending(step_of(parts), 0, 1)
    assert [list(tokens) for tokens in zip(*found, strict=True)] == expected


@pytest.fixture(scope="module")
def llava(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llava")
    BUILDERS["llava"](path)
    model = AutoModelForImageTextToText.from_pretrained(path)
    config = model.config
    for name, value in {**TEXT, "vocab_size": config.text_config.vocab_size, "head_dim": 32}.items():
        setattr(config.text_config, name, value)
    config.text_config.tie_word_embeddings = config.tie_word_embeddings = False
    torch.manual_seed(0)
    AutoModelForImageTextToText.from_config(config).bfloat16().save_pretrained(path)
    return path


def test_embeddings_take_the_places_of_tokens(load: Any, llava: Path) -> None:
    """Embeddings of a prompt that is cut within an image.

    A decode and another prompt are beside it in the step; elsewhere the same token ids are ordinary tokens.
    """
    runner: ModelRunner = load(llava)
    assert runner.takes_images is not None
    model: Any = AutoModelForImageTextToText.from_pretrained(llava, dtype=torch.float32).eval()
    image = runner.takes_images.token_id
    prompt = [5, 6, *[image] * 9, 7, 8, 9]
    embeddings = torch.randn(9, runner.takes_images.hidden_size, generator=torch.Generator().manual_seed(1))

    def expected(tokens: list[int], shown: torch.Tensor | None) -> torch.Tensor:
        with torch.inference_mode():
            inputs = model.get_input_embeddings()(torch.tensor([tokens]))
            if shown is not None:
                inputs[0, 2:11] = shown
            hidden: torch.Tensor = model.model.language_model(inputs_embeds=inputs).last_hidden_state
            logits: torch.Tensor = model.lm_head(hidden)[0]
            return logits

    other = [10, image, image, 11]
    first = Part(prompt, TABLES[0], 0, 6, slot=0)
    begun = Part(other, TABLES[1], 0, 3, slot=1)
    logits = runner.forward(step_of([begun, first], embeddings=EmbeddingRows([5, 6, 7, 8], embeddings[:4]))).clone()
    near(logits, torch.cat((expected(other, None)[:3], expected(prompt, embeddings)[:6])))
    parts = [begun.changed(start=3, length=1), first.changed(start=6, length=8)]
    logits = runner.forward(step_of(parts, embeddings=EmbeddingRows([1, 2, 3, 4, 5], embeddings[4:])))
    near(logits, torch.cat((expected(other, None)[3:], expected(prompt, embeddings)[6:])))
