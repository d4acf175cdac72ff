"""The probe on the stand-in as it is: it says of both versions what the contract says of them.

The stand-in generates with the embedded engine here, and has workers. A12 is left to a machine with a GPU.
"""

import json
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from engine.trtllm import probe
from tests.support.engine_cases import FAKE_TRTLLM
from tests.support.environment import python_path
from tests.support.grammar import tokenizer_folder  # noqa: F401 - a fixture
from tests.support.trtllm import NEWEST, OLDEST, ROOT, model_folder

LANGUAGE = {
    OLDEST: ("requests", "roles", "handoff", "killed", "orphans", "autodeploy"),
    NEWEST: ("requests", "handoff", "killed"),
}
"""What is asked of a language model. Main is asked only where it differs."""
MENDED = {"A1", "A2", "A3.penalties", "A3.bad_words", "A3.seed", "A4", "A5", "A6.own", "A8", "A11"}
"""What main does otherwise than 1.2.1."""
AT_ONCE = 3
"""Groups that run beside each other: they spend most of their time waiting for answers that do not come."""


def outcomes_of(model: Path, seconds: float, names: Sequence[str]) -> list[probe.Outcome]:
    """Run these groups of checks, each in a process of its own, and return what they found."""
    with ThreadPoolExecutor(AT_ONCE) as threads:
        ran = threads.map(lambda name: list(probe.outcomes_of(str(model), seconds, [name])), names)
        return [outcome for found in ran for outcome in found]


@pytest.fixture
def model(tiny_model: Path, tokenizer_folder: Path, tmp_path: Path) -> Path:  # noqa: F811
    """The tiny model with a tokenizer, which guides need, and bfloat16 weights, which load three times as fast."""
    for folder in (tokenizer_folder, tiny_model):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    weights = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor.bfloat16() for name, tensor in weights.items()}, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_the_stand_in_is_as_the_contract_says(
    version: str, model: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", python_path(FAKE_TRTLLM, ROOT.parent))
    monkeypatch.setenv("FAKE_TRTLLM_VERSION", version)
    monkeypatch.setenv("FAKE_TRTLLM_WORKERS", "2")
    pictures = tmp_path_factory.mktemp("pictures")
    model_folder(pictures, vision_config={}, rope_scaling={"mrope_section": [1]})
    monkeypatch.setenv("FAKE_TRTLLM_FAULTS", json.dumps({"device_error": "CUDA error: device-side assert triggered"}))
    found = outcomes_of(pictures, 60.0, ["images", "device"])
    monkeypatch.delenv("FAKE_TRTLLM_FAULTS")
    monkeypatch.setenv("FAKE_TRTLLM_ENGINE", "embedded")
    groups = LANGUAGE[version]
    found += outcomes_of(model, 400.0, groups)
    verdicts = {outcome.id: outcome.verdict for outcome in found}
    mended = MENDED if version == NEWEST else set()
    asked = {check for name in ("images", "device", *groups) for check in probe.GROUPS[name].checks}
    assert mended <= asked
    assert version == NEWEST or asked == probe.FACTS.keys() - {"A12"}
    wanted = {check: "refuted" if check in mended else "confirmed" for check in asked}
    assert verdicts == wanted, "\n".join(f"{outcome.id} {outcome.evidence}" for outcome in found)
