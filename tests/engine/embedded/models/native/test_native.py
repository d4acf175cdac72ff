"""The compiled path on a CPU: what transformers computes, to the same bits in any batch; what it does not know is left to transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.checkpoints.families import FAMILIES
from engine.config import EmbeddedConfig
from engine.embedded.models.load import UnsupportedModelError
from engine.embedded.models.native import build
from engine.embedded.models.native.build import NoCompilerError, library
from engine.embedded.models.native.checkpoint import Checkpoint, read_config
from engine.embedded.models.native.model import NativeModel
from engine.embedded.models.torch.model import Model
from engine.embedded.scheduler import Chunk
from tests.engine.embedded.test_equivalence import OPTIONS, add, make_core, run, tokens

SIZES: dict[str, Any] = {
    "vocab_size": 331,  # neither a multiple of a panel nor of its half
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False},
    "mistral": {"sliding_window": None, "num_key_value_heads": 4},
    "qwen2": {"tie_word_embeddings": True, "num_key_value_heads": 1},
}


def test_every_kind_in_the_table_is_tried() -> None:
    assert KINDS.keys() == {name for name, family in FAMILIES.items() if family.compiled and not family.vision}


class Tokens:
    """A sequence as a model sees it."""

    def __init__(self, length: int, seed: int, blocks: range) -> None:
        self.tokens = torch.randint(
            3, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        self.blocks, self.slot, self.images = list(blocks), 0, None


def chunk(sequence: Any, start: int, length: int) -> Chunk:
    return Chunk(sequence, start, length, True, 0)


def make_folder(folder: Path, kind: str = "llama", dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**SIZES, **options}))
    for parameter in model.parameters():
        parameter.data = torch.randn_like(parameter) * 0.2 + (
            1.0 if parameter.ndim == 1 and "bias" not in kind else 0.0
        )
    model.to(dtype).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp(request.param), request.param, **KINDS[request.param])


def load(folder: Path, **options: Any) -> NativeModel:
    return NativeModel(
        EmbeddedConfig(model=str(folder), **{"num_blocks": 64, "threads": 2, "max_seq_len": 256, **options})
    )


def every_row(model: NativeModel, chunks: list[Chunk]) -> torch.Tensor:
    return model.forward(chunks, list(range(sum(chunk.length for chunk in chunks))))


def test_logits_are_those_of_transformers(folder: Path) -> None:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    sequence = Tokens(150, 1, range(3, 8))
    with torch.inference_mode():
        expected = reference(torch.tensor([sequence.tokens])).logits[0]
    for threads in (1, 3):
        logits = every_row(load(folder, threads=threads), [chunk(sequence, 0, 150)])
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_a_sequence_gets_the_same_logits_to_the_bit_however_it_is_computed(folder: Path) -> None:
    model = load(folder)
    whole = every_row(model, [chunk(Tokens(100, 1, range(4)), 0, 100)])
    sequence, others = (
        Tokens(100, 1, range(4, 8)),
        [Tokens(70, seed, range(8 + 3 * seed, 11 + 3 * seed)) for seed in range(9)],
    )
    parts = []
    for start, length in ((0, 5), (5, 60), (65, 1), (66, 30), (96, 1), (97, 1), (98, 1), (99, 1)):
        company = [chunk(other, start // 2, 1 + (seed + start) % 3) for seed, other in enumerate(others[: start % 10])]
        before = sum(part.length for part in company)
        parts.append(every_row(model, [*company, chunk(sequence, start, length)])[before:])
    assert torch.equal(torch.cat(parts), whole)


def test_only_the_rows_that_are_asked_for_come_back(folder: Path) -> None:
    model = load(folder)
    chunks = [chunk(Tokens(40, 1, range(2)), 0, 40), chunk(Tokens(9, 2, range(2, 3)), 0, 9)]
    whole = every_row(model, chunks)
    assert torch.equal(model.forward(chunks, [39, 3, 48]), whole[[39, 3, 48]])
    assert model.forward(chunks, []).shape == (0, SIZES["vocab_size"])


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_the_engine_runs_it_and_says_what_the_slow_twin_says(
    folder: Path, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIONS, "overlap_scheduler", overlap)
    outputs = []
    for attention, kind in (("auto", NativeModel), ("sdpa", Model)):
        core = make_core(folder, attention=attention, threads=1, num_blocks=24, max_num_tokens=48)
        assert type(core.model) is kind
        for index in range(12):
            add(core, str(index), Tokens(20 + 7 * index, index // 2, range(0)).tokens, max_tokens=12)
        deltas = run(core)
        outputs.append([tokens(deltas[str(index)]) for index in range(12)])
    assert outputs[0] == outputs[1]


def test_weights_that_bfloat16_holds_may_be_of_any_type(tmp_path: Path) -> None:
    narrow = load(make_folder(tmp_path / "narrow"))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow", dtype=torch.float32)
    reference.save_pretrained(tmp_path / "wide")
    sequence = [chunk(Tokens(20, 1, range(1)), 0, 20)]
    assert torch.equal(every_row(narrow, sequence), every_row(load(tmp_path / "wide"), sequence))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "qwen3"}, "the kind qwen3"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding windows"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "scaled rotary positions"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partly rotated heads"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"rms_norm_eps": None}, "no rms_norm_eps"),
    ],
)
def test_other_models_are_refused_with_the_reason(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = make_folder(tmp_path) / "config.json"
    facts = json.loads(config.read_text()) | change
    config.write_text(json.dumps({key: value for key, value in facts.items() if value is not None}))
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path)


def test_tensors_sizes_and_types_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for name, options, reason in (
        ("biased", {"mlp_bias": True}, "without, the tensor model.layers.0.mlp.down_proj.bias"),
        ("odd", {"intermediate_size": 72}, "multiples of .*, and intermediate_size is 72"),
        ("exact", {"dtype": torch.float32}, "bfloat16 would change them"),
    ):
        with pytest.raises(UnsupportedModelError, match=reason):
            load(make_folder(tmp_path / name, **options))
    with pytest.raises(UnsupportedModelError, match="kv_block_size is 8"):
        load(make_folder(tmp_path / "blocks"), kv_block_size=8)
    with pytest.raises(UnsupportedModelError, match="dtype bfloat16"):
        load(tmp_path / "blocks", dtype="bfloat16")


def test_a_checkpoint_in_several_files_is_one(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with Checkpoint(tmp_path, read_config(tmp_path)) as checkpoint:
        assert torch.equal(checkpoint.weight("model.embed_tokens.weight"), model.model.embed_tokens.weight)


def test_without_a_compiler_transformers_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    core = make_core(make_folder(tmp_path / "model"), cache_dir=str(tmp_path / "cache"))
    assert type(core.model) is Model
    assert "no C++ compiler (no-such-compiler); install g++" in caplog.text


def test_code_that_cannot_be_compiled_or_kept_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("int f() { return none; }")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(NoCompilerError, match=r"was not declared|undeclared"):
        library(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(NoCompilerError, match=r"cannot be kept in .*file"):
        library(tmp_path / "file")
