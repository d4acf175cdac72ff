"""The compiled path on a CPU.

It computes what transformers computes, to the same bits in any batch, and leaves models that it does not know to
transformers.

Tests of numbers run at every level (`CPU_ISA`): compiled as this processor has it, or else for the features that the
processor has.
"""

import json
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from engine.checkpoints.families import FAMILIES
from engine.config import EmbeddedConfig
from engine.embedded.models.checkpoint import read_config
from engine.embedded.models.devices import UnsupportedModelError, dtype_of
from engine.embedded.models.load import forecast, load_runner
from engine.embedded.models.native import build, levels
from engine.embedded.models.native.build import NoCompilerError, library
from engine.embedded.models.native.checkpoint import NativeCheckpoint
from engine.embedded.models.native.levels import LEVELS, Arithmetic
from engine.embedded.models.native.runner import NativeRunner
from engine.embedded.models.torch.runner import TorchRunner
from engine.errors import EngineFailure
from tests.engine.embedded.models.native.conftest import ALL_LEVELS
from tests.engine.embedded.test_equivalence import OPTIONS, add, make_core, run, tokens
from tests.support.steps import Part, step_of

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
    "qwen3": {"head_dim": 64},
    "gemma3_text": {
        "query_pre_attn_scalar": 40,
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
}


def test_every_kind_in_the_table_is_tried() -> None:
    assert KINDS.keys() == {name for name, family in FAMILIES.items() if family.compiled and family.media is None}


def tokens_of(length: int, seed: int, vocab_size: int = SIZES["vocab_size"]) -> list[int]:
    drawn = torch.randint(3, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return [token % vocab_size for token in drawn]


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


def load(folder: Path, **options: Any) -> NativeRunner:
    """Load a runner, whose activations are float32 unless a level is named."""
    exact = {} if "cpu_isa" in options else {"dtype": "float32"}
    return NativeRunner(
        EmbeddedConfig(model=str(folder), **{"num_blocks": 64, "threads": 2, "max_seq_len": 256, **exact, **options})
    )


def rounds(level: str) -> bool:
    return next(made.products != Arithmetic.FLOATS for made in LEVELS if made.name == level)


def logits_of(
    folder: Path, tokens: list[int], level: str = "portable", dtype: torch.dtype = torch.float32
) -> torch.Tensor:
    """Logits of transformers: keys, values, and what they and weights are multiplied with, are rounded if the level
    rounds."""
    attention = "rounded" if rounds(level) else "sdpa"
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    for module in reference.modules():
        if isinstance(module, torch.nn.Linear) and rounds(level):
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    with torch.inference_mode():
        logits: torch.Tensor = reference(torch.tensor([tokens])).logits[0].float()
    return logits


def rounded(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().float()


def rounded_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, scaling: float,
    **options: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal attention of one sequence by queries, keys, values and weights in bfloat16, added up in float32."""
    key, value = (rounded(part).repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    scores = rounded(query * scaling) @ key.transpose(2, 3)
    hidden = torch.full(scores.shape[2:], -torch.inf)
    scores += hidden.triu(1)
    if (window := options.get("sliding_window")) is not None:
        scores += hidden.tril(-window)
    weights = rounded((scores - scores.amax(-1, keepdim=True)).exp())
    return (weights @ value / weights.sum(-1, keepdim=True)).transpose(1, 2), None


ALL_ATTENTION_FUNCTIONS.register("rounded", rounded_attention)


def assert_near(logits: torch.Tensor, expected: torch.Tensor, level: str) -> None:
    """Rounded activations are compared on the average: the order of sums decides to which side a few are rounded."""
    if rounds(level):
        assert size(logits - expected) < 0.01 * size(expected)
    else:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def size(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())


def test_rounding_costs_less_than_bfloat16_costs_in_torch(folder: Path, level: str) -> None:
    tokens = tokens_of(150, 1)
    exact = logits_of(folder, tokens)
    model = load(folder, cpu_isa=level)
    logits = model.forward(step_of([Part(tokens, list(range(3, 8)), 0, 150)], groups=len(model.groups)))
    assert size(logits - exact) < 0.75 * size(logits_of(folder, tokens, dtype=torch.bfloat16) - exact)


def test_logits_are_those_of_transformers(folder: Path, level: str) -> None:
    tokens = tokens_of(150, 1)
    expected = logits_of(folder, tokens, level)
    for threads in (1, 3):
        model = load(folder, threads=threads, cpu_isa=level)
        assert (model.instruction_set, model.dtype) == (level, torch.float32)
        logits = model.forward(step_of([Part(tokens, list(range(3, 8)), 0, 150)], groups=len(model.groups)))
        assert_near(logits, expected, level)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_a_sequence_gets_the_same_logits_to_the_bit_however_it_is_computed(
    folder: Path, level: str, quantization: str
) -> None:
    model = load(folder, cpu_isa=level, quantization=quantization)
    sequence = Part(tokens_of(170, 1), list(range(6)), 0, 170)
    groups = len(model.groups)
    whole = model.forward(step_of([sequence], groups=groups)).clone()
    sequence = sequence.changed(table=list(range(6, 12)))
    others = [Part(tokens_of(70, seed), list(range(12 + 3 * seed, 15 + 3 * seed)), 0, 1) for seed in range(9)]
    parts = []
    starts = [0, 5, 65, 66, 70, 72, 96, 97, 98, 99, 127, 128, 129, 170]
    for start, length in ((start, end - start) for start, end in pairwise(starts)):
        mine = sequence.changed(start=start, length=length)
        company = [
            other.changed(start=start // 2, length=1 + (seed + start) % 3)
            for seed, other in enumerate(others[: start % 10])
        ]
        members = sorted([*company, mine], key=lambda part: part.length > 1)
        before = sum(part.length for part in members[: members.index(mine)])
        parts.append(model.forward(step_of(members, groups=groups))[before : before + length].clone())
    assert torch.equal(torch.cat(parts), whole)


def test_threads_without_a_core_stand_aside(folder: Path) -> None:
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # of this thread, and of those that it starts
    try:
        model = load(folder, threads=4)
        step = step_of([Part(tokens_of(100, 1), list(range(7)), 0, 100)], groups=len(model.groups))
        logits, threads = model.forward(step).clone(), {model.threads}
        runs, end = 0, time.monotonic() + 30  # others may use the core as well
        while (runs < 50 or min(threads) >= 3) and time.monotonic() < end:
            assert torch.equal(model.forward(step), logits)
            threads.add(model.threads)
            runs += 1
    finally:
        os.sched_setaffinity(0, cores)
    assert max(threads) == 4
    assert min(threads) < 3


ODD_SIZES: dict[str, dict[str, Any]] = {
    "hidden": {"hidden_size": 76},
    "intermediate": {"intermediate_size": 75},
    "heads": {"head_dim": 18, "hidden_size": 78, "num_attention_heads": 6},
    "tiny": {
        "head_dim": 2,
        "hidden_size": 5,
        "intermediate_size": 3,
        "vocab_size": 11,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
    },
}


@pytest.mark.parametrize("sizes", ODD_SIZES)
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_sizes_need_not_fill_vectors(tmp_path: Path, sizes: str, kind: str, level: str) -> None:
    """No size is refused at one level and taken at another.

    A panel is 8, 16 or 32 wide, and these sizes are multiples of none.
    """
    options = {**KINDS[kind], **ODD_SIZES[sizes]}
    tokens = tokens_of(50, 1, options.get("vocab_size", SIZES["vocab_size"]))
    expected = logits_of(make_folder(tmp_path, kind, **options), tokens, level)
    model = load(tmp_path, kv_block_size=11, cpu_isa=level)
    steps = [
        step_of([Part(tokens, list(range(3, 8)), start, length)], groups=len(model.groups))
        for start, length in ((0, 30), (30, 1), (31, 19))
    ]
    assert_near(torch.cat([model.forward(step).clone() for step in steps]), expected, level)


@pytest.mark.parametrize("rounding", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("size", [1, 2, 7, 8, 16, 24, 31, 33, 64, 600, 1024])
def test_blocks_of_any_size_hold_the_same_at_every_level_of_a_type(
    tmp_path: Path, size: int, rounding: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a sequence goes on with the blocks that another level has filled, as when they come from another replica."""
    folder = make_folder(tmp_path)
    monkeypatch.setattr(levels, "LEVELS", ALL_LEVELS)
    count = -(-90 // size)
    sequence = Part(tokens_of(90, 1), list(range(count, 2 * count)), 0, 90)
    names = [level.name for level in LEVELS if rounds(level.name) == rounding]
    models = [load(folder, kv_block_size=size, num_blocks=2 * count, cpu_isa=name) for name in names]
    assert {model.memory.dtype for model in models} == {"bfloat16" if rounding else "float32"}
    filled = [model.forward(step_of([sequence])).clone() for model in models]
    for model, logits in zip(models, filled, strict=True):
        assert_alike(model, logits, filled[0])
        assert_alike(model, model.memory.blocks[0].float(), models[0].memory.blocks[0].float())
    for model, other in zip(models, [*models[1:], models[0]], strict=True):
        other.memory.blocks[0][:] = model.memory.blocks[0]
        last = other.forward(step_of([sequence.changed(start=89, length=1)]))
        assert_alike(other, last, filled[0][89:])


@pytest.mark.parametrize("size", [6, 32, 64])
def test_what_a_block_held_before_reaches_no_logits(tmp_path: Path, size: int, level: str) -> None:
    """Even if it was no number."""
    folder, blocks = make_folder(tmp_path), list(range(1, 1 + 70 // size + 1))
    clean, used = (load(folder, kv_block_size=size, num_blocks=2 + 70 // size, cpu_isa=level) for _ in range(2))
    used.memory.blocks[0].fill_(torch.nan)
    for start, length in ((0, 33), (33, 1), (34, 1), (35, 35)):
        step = step_of([Part(tokens_of(70, 1), blocks, start, length)])
        logits = used.forward(step).clone()
        assert logits.isfinite().all()
        assert torch.equal(logits, clean.forward(step))


def assert_alike(model: NativeRunner, values: torch.Tensor, first: torch.Tensor) -> None:
    """Levels add up the same products in the same order, but not all fuse multiplication and addition, and some round
    activations, each to its own side. Logits here are up to 60."""
    if rounds(model.instruction_set):
        assert size(values - first) < 0.03 * size(first)
    else:
        torch.testing.assert_close(values, first, rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("overlap", ["off", "on"])
def test_the_engine_generates_the_tokens_of_the_torch_runner(
    folder: Path, overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OPTIONS, "overlap_scheduler", overlap)
    outputs = []
    for attention, kind in (("auto", NativeRunner), ("sdpa", TorchRunner)):
        core = make_core(folder, attention=attention, threads=1, num_blocks=24, max_num_tokens=48)
        assert type(core.runner) is kind
        for index in range(12):
            add(core, str(index), tokens_of(20 + 7 * index, index // 2), max_tokens=12)
        deltas = run(core)
        outputs.append([tokens(deltas[str(index)]) for index in range(12)])
    assert outputs[0] == outputs[1]


def test_weights_that_bfloat16_holds_may_be_of_any_type(tmp_path: Path) -> None:
    narrow = load(make_folder(tmp_path / "narrow"))
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "narrow", dtype=torch.float32)
    reference.save_pretrained(tmp_path / "wide")
    step = step_of([Part(tokens_of(20, 1), [0], 0, 20)])
    assert torch.equal(narrow.forward(step), load(tmp_path / "wide").forward(step))


SCALED: list[dict[str, Any]] = [
    {"rope_type": "linear", "factor": 4.0},
    {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
]


@pytest.mark.parametrize("rope", SCALED, ids=lambda rope: rope["rope_type"])
def test_scaled_positions_are_those_of_transformers(rope: dict[str, Any], tmp_path: Path) -> None:
    folder = make_folder(tmp_path, rope_parameters={"rope_theta": 1e4, **rope})
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens = tokens_of(150, 1)
    with torch.inference_mode():
        expected = reference(torch.tensor([tokens])).logits[0]
    logits = load(folder).forward(step_of([Part(tokens, list(range(3, 8)), 0, 150)]))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"]["factor"] = "8"
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModelError, match="does not know these scaled rotary positions"):
        load(folder)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"model_type": "gemma2"}, "the model type gemma2"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding windows"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding windows"),
        ({"hidden_act": "gelu"}, "the activation gelu"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "scaled rotary positions"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partly rotated heads"),
        ({"quantization_config": {"bits": 4}}, "quantised weights"),
        ({"head_dim": 33}, "heads of an odd size"),
        ({"mlp_bias": True}, "biases of all projections"),
        ({"model_type": "qwen2", "rms_norm_eps": None}, "no rms_norm_eps"),
    ],
)
def test_other_models_are_refused_with_the_reason(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    config = make_folder(tmp_path) / "config.json"
    facts = json.loads(config.read_text()) | change
    config.write_text(json.dumps({key: value for key, value in facts.items() if value is not None}))
    with pytest.raises(UnsupportedModelError, match=reason):
        load(tmp_path)


def test_types_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="bfloat16 would change them"):
        load(make_folder(tmp_path / "exact", dtype=torch.float32))
    with pytest.raises(UnsupportedModelError, match="dtype bfloat16"):
        load(make_folder(tmp_path / "plain"), dtype="bfloat16")


def test_a_checkpoint_in_several_files_is_one(tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES)).bfloat16()
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    with NativeCheckpoint(tmp_path, read_config(tmp_path)) as checkpoint:
        assert torch.equal(checkpoint.weight("model.embed_tokens.weight"), model.model.embed_tokens.weight)


def test_without_a_compiler_transformers_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "_COMPILERS", ("no-such-compiler",))
    core = make_core(make_folder(tmp_path / "model"), cache_dir=str(tmp_path / "cache"))
    assert type(core.runner) is TorchRunner
    assert "no C++ compiler (no-such-compiler); install g++" in caplog.text


def test_code_that_cannot_be_compiled_or_kept_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "wrong.cpp"
    source.write_text("int f() { return none; }")
    monkeypatch.setattr(build, "SOURCE", source)
    with pytest.raises(NoCompilerError, match=r"was not declared|undeclared"):
        library(tmp_path / "cache", LEVELS[0])
    assert not list((tmp_path / "cache").iterdir())
    (tmp_path / "file").write_text("")
    with pytest.raises(NoCompilerError, match=r"cannot be kept in .*file"):
        library(tmp_path / "file", LEVELS[0])


def test_a_level_that_the_processor_lacks_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "_features", lambda: frozenset({"sse2", "avx2", "avx512f"}))
    with pytest.raises(
        EngineFailure, match=r"CPU_ISA=avx2 cannot be used: this processor has portable and lacks abm, .*movbe"
    ):
        load_runner(EmbeddedConfig(model=str(tmp_path), cpu_isa="avx2"))
    assert levels.chosen("auto")[0].name == "portable"
    monkeypatch.setattr(levels, "_features", lambda: frozenset().union(*(level.needs for level in LEVELS)))
    assert [levels.chosen(name)[0].name for name in ("auto", "avx512", "portable")] == ["amx", "avx512", "portable"]
    assert levels.chosen("auto", "float32")[0].name == "avx512_vnni"
    with pytest.raises(EngineFailure, match="CPU_ISA=amx rounds activations to bfloat16, and DTYPE=float32 does not"):
        levels.chosen("amx", "float32")


@pytest.mark.parametrize(
    ("vendor", "lacked", "dtype", "level"),
    [
        ("AuthenticAMD", "amx_tile", "auto", "avx512_bf16"),
        ("AuthenticAMD", "amx_tile", "float32", "avx512_vnni"),
        ("AuthenticAMD", "avx512_bf16", "auto", "avx512_vnni"),
        ("AuthenticAMD", "avx512f", "auto", "avx_vnni"),
        ("GenuineIntel", "amx_tile", "auto", "avx512_vnni"),
        ("GenuineIntel", "none", "auto", "amx"),
    ],
)
def test_auto_multiplies_pairs_of_bfloat16_where_that_is_fast(
    vendor: str, lacked: str, dtype: str, level: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    features = frozenset().union(*(level.needs for level in LEVELS)) - {lacked}
    monkeypatch.setattr(levels, "_features", lambda: features)
    monkeypatch.setattr(levels, "_vendor", lambda: vendor)
    assert levels.chosen("auto", dtype)[0].name == level


def test_features_are_those_of_every_core() -> None:
    lines = ["processor : 0", "flags\t\t: fpu avx2 fma", "flags\t\t: fpu avx2 avx512f", "power management:"]
    assert levels.common_flags(lines) == {"fpu", "avx2"}
    assert levels.common_flags([]) == frozenset()


def test_the_type_chosen_does_not_depend_on_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    for fast in (False, True):
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda fast=fast: fast)
        assert dtype_of(EmbeddedConfig(model=""), torch.device("cpu")) == torch.float32
    assert dtype_of(EmbeddedConfig(model="", dtype="bfloat16"), torch.device("cpu")) == torch.bfloat16


@pytest.mark.parametrize(
    ("options", "path"),
    [({}, "native"), ({"attention": "sdpa"}, "transformers"), ({"dtype": "bfloat16"}, "transformers")],
)
def test_the_forecast_of_the_compute_path_equals_the_loaded_one(
    tmp_path: Path, options: dict[str, Any], path: str
) -> None:
    config = EmbeddedConfig(model=str(make_folder(tmp_path)), device="cpu", num_blocks=4, cpu_isa="portable", **options)
    said, model = dict(forecast(config)), load_runner(config)
    assert said["compute_path"].split()[0] == model.compute_path == path
    assert said["dtype"] == str(model.dtype).removeprefix("torch.")
    assert said.get("instruction_set", model.instruction_set) == model.instruction_set


def test_a_level_that_the_compiler_lacks_leaves_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    unknown = LEVELS[0]._replace(name="newest", flags=("-mnone-such",))
    assert build.first_compiled(tmp_path, [unknown, *LEVELS[:1]]) == LEVELS[0]
    assert "does not know the instructions of CPU_ISA=newest" in caplog.text
