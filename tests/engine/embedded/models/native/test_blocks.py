"""Weights in blocks of 8 and 4 bits on the compiled path: at every level they compute what their values say."""

import subprocess
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, dequantize, quantize
from torch.nn import functional
from transformers import AutoModelForCausalLM

from engine.config import EmbeddedConfig
from engine.embedded.models.load import forecast, load_runner
from engine.embedded.models.native import levels
from engine.embedded.models.native.build import SOURCE, find_compiler, flags_of
from engine.embedded.models.native.checkpoint import NativeCheckpoint
from engine.embedded.models.native.levels import LEVELS, Level
from engine.embedded.models.native.structures import Kind
from engine.errors import EngineFailure
from tests.engine.embedded.models.native.test_native import (
    KINDS,
    ODD_SIZES,
    load,
    make_folder,
    rounds,
    size,
    tokens_of,
)
from tests.support.steps import Part, step_of

Q4_0, Q4_1, Q8_0 = GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0


def int8(weight: torch.Tensor) -> torch.Tensor:
    """Round to multiples of a 127th of the largest of 32 neighbours, which has 16 bits itself."""
    groups = functional.pad(weight, (0, -weight.shape[1] % 32)).unflatten(1, (-1, 32))
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half().float()
    return (torch.round(groups / scales).nan_to_num() * scales).flatten(1)[:, : weight.shape[1]]


def narrow(level: str) -> bool:
    """Whether activations have 8 bits at a level, as it is compiled here."""
    return any("vnni" in flag for made in levels.LEVELS if made.name == level for flag in made.flags)


def in_bytes(activations: torch.Tensor) -> torch.Tensor:
    """Round to multiples of a 127th of the largest of 32 neighbours."""
    groups = functional.pad(activations, (0, -activations.shape[-1] % 32)).unflatten(-1, (-1, 32))
    scales = groups.abs().amax(-1, keepdim=True) / 127
    return (torch.round(groups / scales).nan_to_num() * scales).flatten(-2)[..., : activations.shape[-1]]


def matrices(folder: Path) -> dict[str, torch.Tensor]:
    state = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    return {name: weight for name, weight in state.items() if weight.ndim == 2}


class Reference:
    """Transformers with rounded weights."""

    def __init__(self, folder: Path, rounded: dict[str, torch.Tensor]) -> None:
        self.folder = folder
        self.tokens = tokens_of(140, 1, rounded["model.embed_tokens.weight"].shape[0])
        self._rounded = rounded
        self._logits: dict[tuple[bool, bool], torch.Tensor] = {}

    def logits(self, level: str) -> torch.Tensor:
        """Those with activations, keys and values as the level rounds them, computed once for levels that round alike:
        activations that make queries, keys, values and logits are not rounded."""
        how = narrow(level), rounds(level)
        if how not in self._logits:
            self._logits[how] = self._compute(*how)
        return self._logits[how]

    def _compute(self, narrow: bool, rounds: bool) -> torch.Tensor:
        attention = "rounded" if rounds else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32, attn_implementation=attention)
        model.load_state_dict(self._rounded, strict=False)
        for name, module in model.named_modules():
            if narrow and name.endswith(("o_proj", "gate_proj", "up_proj", "down_proj")):
                module.register_forward_pre_hook(lambda _, inputs: (in_bytes(inputs[0]),))
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([self.tokens])).logits[0]
        return logits


def check(reference: Reference, level: str) -> None:
    """Compare all of a prompt, in steps of one row and of many, with the values that the weights have, and bit for bit
    with a single step."""
    tokens, logits = reference.tokens, reference.logits(level)
    for threads in (1, 3):
        model = load(reference.folder, cpu_isa=level, quantization="int8", threads=threads)
        parts = [(0, 100), (100, 1), (101, 5), (106, 34)]
        whole, *steps = (
            step_of([Part(tokens, list(range(3, 8)), start, length)], groups=len(model.groups))
            for start, length in ((0, 140), *parts)
        )
        computed = torch.cat([model.forward(step).clone() for step in steps])
        assert torch.equal(computed, model.forward(whole))
        if narrow(level) or rounds(level):
            errors = (computed - logits).square().mean(-1).sqrt() / size(logits)
            share = 1 if narrow(level) else 0.2  # where keys and values alone are rounded
            assert errors.max() < 0.1 * share, "the order of sums decides how a few are rounded"
            assert errors.mean() < 0.03 * share
            # Rounded keys and values leave fewer of them: one of these reaches all rows behind it.
            assert errors.min() < (0.01 if rounds(level) else 0.005) * share, "rows where it decides nothing"
        else:
            torch.testing.assert_close(computed, logits, rtol=1e-3, atol=1e-3 * float(logits.abs().max()))


@pytest.fixture(
    scope="module",
    params=[*product(["llama", "qwen2", "qwen3"], ["even", *ODD_SIZES]), ("gemma3_text", "even")],
    ids="-".join,
)
def in_int8(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    kind, sizes = request.param
    folder = tmp_path_factory.mktemp(kind)
    make_folder(folder, kind, **{**KINDS[kind], **ODD_SIZES.get(sizes, {})})
    return Reference(folder, {name: int8(weight) for name, weight in matrices(folder).items()})


def test_int8_rounds_weights_and_nothing_else(in_int8: Reference, level: str) -> None:
    check(in_int8, level)


def store(monkeypatch: pytest.MonkeyPatch, kinds: dict[str, GGMLQuantizationType]) -> None:
    """Let checkpoints hold matrices as blocks, as GGUF files do; `kinds` by the ends of names."""

    def kind(_: NativeCheckpoint, name: str) -> Kind | None:
        return next((Kind[kind.name] for end, kind in kinds.items() if name.endswith(end)), None)

    def blocks(self: NativeCheckpoint, name: str) -> torch.Tensor:
        (kind,) = (kind for end, kind in kinds.items() if name.endswith(end))
        return torch.from_numpy(quantize(self.floats(name).numpy(), kind))

    monkeypatch.setattr(NativeCheckpoint, "block_kind", kind)
    monkeypatch.setattr(NativeCheckpoint, "blocks", blocks)


def rounded_to(weight: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    return torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind))


@pytest.fixture(scope="module", params=[Q8_0, Q4_0, Q4_1], ids=lambda kind: kind.name)
def in_blocks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[GGMLQuantizationType, Reference]:
    kind: GGMLQuantizationType = request.param
    folder = make_folder(tmp_path_factory.mktemp(kind.name), num_hidden_layers=1)
    return kind, Reference(folder, {name: rounded_to(weight, kind) for name, weight in matrices(folder).items()})


def test_stored_blocks_are_computed_as_they_are(
    in_blocks: tuple[GGMLQuantizationType, Reference], level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, reference = in_blocks
    store(monkeypatch, {"": kind})
    check(reference, level)


def test_matrices_of_one_product_that_are_stored_differently_become_int8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_folder(tmp_path)
    store(monkeypatch, {"q_proj.weight": Q4_1, "down_proj.weight": Q4_0, "up_proj.weight": Q8_0})
    rounded = {name: int8(weight) for name, weight in matrices(tmp_path).items()}
    for name, weight in matrices(tmp_path).items():
        if "down_proj" in name or "up_proj" in name:
            rounded[name] = rounded_to(weight, Q4_0 if "down_proj" in name else Q8_0)
    check(Reference(tmp_path, rounded), "portable")


def test_int8_takes_weights_that_bfloat16_does_not_hold(tmp_path: Path) -> None:
    make_folder(tmp_path, dtype=torch.float32)
    check(Reference(tmp_path, {name: int8(weight) for name, weight in matrices(tmp_path).items()}), "portable")


def test_a_weight_that_is_not_finite_is_named(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(make_folder(tmp_path))
    model.model.layers[1].mlp.up_proj.weight.data[3, 5] = float("inf")
    model.save_pretrained(tmp_path)
    with pytest.raises(EngineFailure, match=r"layers\.1\.mlp\.up_proj\.weight.* not finite"):
        load(tmp_path, quantization="int8")


def test_extreme_weights_and_activations_are_computed(tmp_path: Path) -> None:
    """Rows of zeros, and groups whose scale is a subnormal 16-bit float."""
    model = AutoModelForCausalLM.from_pretrained(make_folder(tmp_path))
    model.model.embed_tokens.weight.data[5] = 0
    model.model.layers[0].mlp.down_proj.weight.data[2] *= 2.0**-16
    model.save_pretrained(tmp_path)
    check(Reference(tmp_path, {name: int8(weight) for name, weight in matrices(tmp_path).items()}), "portable")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"attention": "sdpa"}, "QUANTIZATION=int8 cannot be used with ATTENTION=sdpa"),
        ({"dtype": "bfloat16"}, "QUANTIZATION=int8 cannot be used: dtype bfloat16"),
        ({"device": "cuda"}, "QUANTIZATION=int8 cannot be used: it is for a CPU; a GPU takes fp8"),
    ],
)
def test_where_int8_cannot_be_used_it_is_refused(
    tmp_path: Path, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    config = EmbeddedConfig(model=str(make_folder(tmp_path)), **{"device": "cpu", "quantization": "int8", **options})
    with pytest.raises(EngineFailure, match=said):
        load_runner(config)


def test_the_forecast_names_the_compute_path_of_int8(tmp_path: Path) -> None:
    config = EmbeddedConfig(model=str(make_folder(tmp_path, dtype=torch.float32)), device="cpu", quantization="int8")
    said = dict(forecast(config))
    assert (said["compute_path"], said["quantization"]) == ("native", "int8")
    make_folder(tmp_path, hidden_act="gelu")
    with pytest.raises(EngineFailure, match=r"QUANTIZATION=int8 cannot be used: .*the activation gelu"):
        dict(forecast(config))


@pytest.mark.parametrize("lacked", sorted({*LEVELS} - {*levels.available()}), ids=lambda level: level.name)
def test_levels_that_this_processor_lacks_are_valid_code(lacked: Level) -> None:
    """The other levels' code is compiled, and run, by the tests above."""
    command = [find_compiler(), "-fsyntax-only", "-w", *flags_of(lacked), SOURCE]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""
