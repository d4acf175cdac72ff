"""Images in the GPU's model without a GPU: graphs and eager steps take embeddings."""

from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("test_cuda_engine runs the model on the GPU", allow_module_level=True)

from engine.config import EmbeddedConfig
from engine.embedded.core import EngineCore
from tests.engine.embedded.models.native.test_native_images import make_folder
from tests.support.cuda import cuda_runner, interpreter  # noqa: F401 - fixtures
from tests.support.handoff import tokens
from tests.support.vision_prompts import Family, Prompt, answers, request_for, text

pytestmark = pytest.mark.usefixtures("cuda_runner")
OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "max_num_tokens": 24, "max_batch_size": 4, "kv_block_size": 4,
    "num_blocks": 60, "max_seq_len": 96,
    "overlap_scheduler": "on",
}  # fmt: skip


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(make_folder("llava", tmp_path_factory.mktemp("llava"), intermediate_size=64))


@pytest.fixture(scope="module")
def prompts(family: Family) -> list[Prompt]:
    return [family.prompt(text(5, 0), 0, text(2, 1)), family.prompt(text(5, 0), 1, 2)]


@pytest.fixture(scope="module")
def expected(family: Family, prompts: list[Prompt]) -> list[list[int]]:
    return [family.generate(prompt, 4) for prompt in prompts]


@pytest.mark.parametrize(("short", "most"), [(24, 24), (16, 16), (4, 24)])
def test_greedy_equals_generate(
    family: Family,
    prompts: list[Prompt],
    expected: list[list[int]],
    short: int,
    most: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Images in graphs alone, in steps of which some are too large for one, and in graphs with few rows of logits."""
    monkeypatch.setattr("engine.embedded.models.cuda.graph_sizes.SHORT_PROMPT", short)
    monkeypatch.setattr("engine.embedded.models.cuda.graph_sizes.PROMPTS", (most,))
    monkeypatch.setattr("engine.embedded.models.cuda.graph_sizes.LAUNCH_SECONDS", float(most > short))
    core = EngineCore(EmbeddedConfig(model=str(family.folder), **OPTIONS), lambda _: None)
    assert max(core.runner.graph_sizes) == most  # type: ignore[attr-defined]
    for turn in "ab":  # the second time from blocks that the first has left
        deltas = answers(
            core, [request_for(f"{turn}{index}", prompt, max_tokens=4) for index, prompt in enumerate(prompts)]
        )
        assert [tokens(deltas[f"{turn}{index}"]) for index in range(len(prompts))] == expected
    assert expected[0] != expected[1]
