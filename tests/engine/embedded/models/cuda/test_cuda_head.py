"""The GPU's EAGLE-3 head without a GPU: it drafts what torch's operations do."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("test_gpu_head runs it on the GPU", allow_module_level=True)
pytest.importorskip("triton", reason="Triton is not installed")

from engine.checkpoints.eagle import EagleHead, read_eagle_head
from engine.checkpoints.facts import read_model_facts
from engine.embedded.models import heads
from engine.embedded.models.cuda import graph_sizes
from engine.embedded.models.cuda.head import Chain, CudaHead
from engine.embedded.models.cuda.rounds import CudaRounds
from engine.embedded.models.heads import HeadDraft, HeadStep, RoundStart
from tests.engine.embedded.models.cuda.test_cuda_model import run
from tests.support.cuda import cuda_runner, interpreter, save  # noqa: F401 - fixtures
from tests.support.eagle import MOST, Both
from tests.support.head_files import YARN, write_head

pytestmark = pytest.mark.usefixtures("cuda_runner")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), 0.15)


@pytest.fixture(scope="module", params=[{}, {"norm_before_residual": True}, {"rope_scaling": YARN}], ids=str)
def head(tmp_path_factory: pytest.TempPathFactory, folder: Path, request: pytest.FixtureRequest) -> EagleHead:
    path = tmp_path_factory.mktemp("head")
    write_head(path, **request.param)
    return read_eagle_head(path, read_model_facts(folder))


def compare(pairs: list[tuple[HeadDraft, HeadDraft]]) -> int:
    """Compare drafts; return the number of tokens."""
    for expected, found in pairs:
        assert found.tokens == expected.tokens
        assert found.probabilities == pytest.approx(expected.probabilities, rel=1e-3)
    return sum(len(found.tokens) for _, found in pairs)


@pytest.mark.parametrize("graphs", [True, False])
def test_drafts_are_those_of_plain_operations(head: EagleHead, graphs: bool) -> None:
    """Several sequences are drafted for again and again. The tables of some lack their first blocks."""
    both, rng = Both(head, graphs=graphs), random.Random(5)
    both.ends, both.skipped = [0, 9, 22, 5, 13], [0, 2, 4, 0, 1]
    seen = 0
    for round_ in range(8):
        chosen = rng.sample(range(5), rng.choice([1, 2, 3, 5]))
        asked = [(index, rng.choice([1, 1, 2, 3]), rng.randrange(MOST + 1)) for index in chosen]
        asked[0] = (*asked[0][:2], asked[0][2] if round_ % 2 else MOST)
        seen += compare(both.draft(asked, rng.choice([0.0, 0.0, 1e-3])))
    assert seen > 30


def test_a_longer_draft_beside_it_leaves_the_blocks_of_others(head: EagleHead, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tokens of a short draft are computed as far as those of a long one: behind its table, where that of another
    sequence was before."""
    monkeypatch.setattr("engine.embedded.models.cuda.head._WIDTH", 1)
    both = Both(head)
    compare(both.draft([(0, 12, 1), (1, 3, 1)]))
    compare(both.draft([(2, 7, 1), (3, 1, MOST)]))
    compare(both.draft([(0, 1, MOST), (1, 1, 1)]))


def test_any_number_of_sequences_is_read_by_a_graph(head: EagleHead, monkeypatch: pytest.MonkeyPatch) -> None:
    both = Both(head)
    monkeypatch.delattr(CudaHead, "read")
    for count in range(1, 6):
        compare(both.draft([(index, 1, 1) for index in range(count)]))


def test_tables_on_the_device_are_those_of_the_sequences() -> None:
    """Also after some that were the same, or longer, or more."""
    chain, rng, spare = Chain(4, 8, 3, 24, 99, torch.zeros(8, 1)), random.Random(3), 99
    tables: list[list[int]] = []
    for _ in range(300):
        if not tables or rng.random() < 0.6:
            tables = [rng.choices(range(50), k=rng.randrange(1, 9)) for _ in range(rng.randrange(1, 5))]
        width = rng.choice([8, 12, 24])
        chain.set_tables(tables, width)
        wanted = [(table + [spare] * width)[:width] for table in tables] + [[spare] * width] * (5 - len(tables))
        assert chain.tables[:, :width].tolist() == wanted


@pytest.mark.parametrize("launching", [0.0, 1.0])
def test_a_head_changes_nothing(
    folder: Path, head: EagleHead, monkeypatch: pytest.MonkeyPatch, launching: float
) -> None:
    """With steps prepared ahead, and further tokens of drafts taken at once; also if all steps are graphs."""
    monkeypatch.setattr(graph_sizes, "LAUNCH_SECONDS", launching)
    monkeypatch.setattr(graph_sizes, "PROMPTS", (8, 12, 24))
    prompts = [[5, 9, 4, 30, 7], [8, 8, 8]]
    asked = {"speculative": "eagle3", "speculative_model": str(head.folder), "speculative_min_speedup": 0.0}
    asked |= {"speculative_tokens": 3, "speculative_min_match": 1000}
    drafted = list[int]()
    draft = CudaHead.draft

    def note(self: CudaHead, step: HeadStep, limits: list[int], least: float) -> Any:
        drafted.extend(limits)
        return draft(self, step, limits, least)

    monkeypatch.setattr(CudaHead, "draft", note)
    sampling = [{"max_tokens": 12}, {"max_tokens": 12, "temperature": 1.0, "seed": 3, "logprobs": 1}]
    plain = run(folder, prompts, sampling)
    found = run(folder, prompts, sampling, **asked)
    assert found.tokens == plain.tokens and sum(drafted) > 10


@pytest.mark.timeout(300)
@pytest.mark.parametrize("streams", [1, 3])
def test_rounds_change_nothing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: int) -> None:
    """The device drafts and verifies several times before the host sees anything; requests end in the middle of that,
    and others begin."""
    write_head(tmp_path)
    monkeypatch.setattr(graph_sizes, "SHORT_PROMPT", {1: 4, 3: 16}[streams])
    monkeypatch.setattr(heads, "MOST_READ", 16)
    prompts = [[5, 9, 4, 30, 7], [8, 8, 8], [3, 4], [9, 9, 1, 2]][: streams + 1]
    sampling: list[dict[str, Any]] = [
        {"max_tokens": 15}, {"max_tokens": 17, "temperature": 1.0, "seed": 3}, {"max_tokens": 12},
        {"max_tokens": 14, "temperature": 0.7, "seed": 4, "min_tokens": 9},
    ]  # fmt: skip
    asked = {"speculative": "eagle3", "speculative_model": str(tmp_path), "speculative_min_speedup": 0.0}
    asked |= {"speculative_tokens": 3, "speculative_min_match": 1000, "max_batch_size": streams}
    asked |= {"max_num_tokens": 60}
    ran = list[tuple[int, bool, list[int]]]()
    run_rounds = CudaRounds.run

    def note(self: CudaRounds, starts: list[RoundStart], step: HeadStep, rounds: int) -> torch.Tensor:
        ran.append((rounds, self.goes_on(starts), [start.admission for start in starts]))
        return run_rounds(self, starts, step, rounds)

    monkeypatch.setattr(CudaRounds, "run", note)
    plain = run(folder, prompts, sampling[: len(prompts)], max_batch_size=streams)
    found = run(folder, prompts, sampling[: len(prompts)], **asked)
    assert found.tokens == plain.tokens
    assert {goes_on for _, goes_on, _ in ran} == {True, False} and max(rounds for rounds, *_ in ran) > 1
    for (_, _, before), (_, goes_on, now) in pairwise(ran):
        assert before == now or not goes_on
