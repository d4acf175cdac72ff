"""Gemma 3 from GGUF files: a tiny one made here, in parts; and the packaged gemma-3-270m where it is installed."""

import importlib.util
import json
import resource
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from engine.checkpoints.gguf_gemma import GEMMA3
from engine.checkpoints.store import PACKAGED, ModelError, Packaged, resolve_model
from tests.engine.embedded.test_equivalence import add, make_core, run
from tests.engine.embedded.test_equivalence import tokens as tokens_of
from tests.support.window_models import generate, save

NAME = "gemma-3-270m"
# llama.cpp's tokenize(text, add_bos=False, special=True) of the packaged file.
GOLDEN = [
    ("Hello world", [9259, 1902]),
    ("In 2024,", [902, 236743, 236778, 236771, 236778, 236812, 236764]),
    ("\xbd of \u0663\u0664 and \u2167\xb2", [238612, 529, 223766, 242090, 532, 236743, 251329, 238131]),
    (
        "Z\xfcrich, na\xefve caf\xe9 \u2014 \u6771\u4eac \u041f\u0440\u0438\u0432\u0435\u0442 "
        "\u0645\u0631\u062d\u0628\u0627",
        [236953, 105214, 236764, 120362, 33443, 2192, 86459, 15745, 8362, 150423],
    ),
    (
        "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f642\U0001f44d\U0001f3fd "
        "\U0001f1e9\U0001f1ea",
        [243767, 237243, 243767, 237243, 244814, 237243, 244990, 57235, 240493, 242713, 236743, 246841, 245562],
    ),
    ("  two\t\ttabs \n\n\n new  lines   ", [138, 13498, 255969, 39218, 236743, 109, 861, 138, 8721, 139]),
    (
        "def f(x):\n    return x**2  # it's\n",
        [2063, 517, 236769, 236781, 1473, 107, 140, 2060, 1123, 1018, 236778, 138, 236865, 625, 236789, 236751, 107],
    ),
    ("<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n", [105, 2364, 107, 10979, 106, 107, 105, 4368, 107]),
    ("a<eos>b <table><tr> x</tr> <unused7>", [236746, 1, 236763, 236743, 168, 173, 1123, 181, 236743, 13]),
    ("I'll we've DON'T", [236777, 236789, 859, 692, 236789, 560, 52402, 236789, 236774]),
    ("", []),
    (" ", [236743]),
    ("\xa0nbsp\u200bzero", [432, 398, 11539, 237141, 13321]),
    ("e\u0301 \ufeff\x00\x7f", [236744, 238288, 39131, 238, 251541]),
]
VOCABULARY = [
    "<pad>",
    "<eos>",
    "<bos>",
    "<unk>",
    "\n\n",
    "  ",
    *(f"<0x{byte:02X}>" for byte in range(256)),
    *"▁abc",
    "ab",
    "▁a",
    "bc",
    "▁ab",
]


def vocabulary() -> dict[str, Any]:
    """A vocabulary as GGUF files have it: the pieces of the end are joined, those that come first before others."""
    kinds = {"<": TokenType.CONTROL, "\n": TokenType.USER_DEFINED, " ": TokenType.USER_DEFINED}
    types = [
        TokenType.BYTE if token.startswith("<0x") else kinds.get(token[0], TokenType.NORMAL) for token in VOCABULARY
    ]
    return {
        "tokenizer.ggml.tokens": VOCABULARY,
        "tokenizer.ggml.token_type": [int(kind) for kind in types],
        "tokenizer.ggml.scores": [float(-index) for index in range(len(VOCABULARY))],
        "tokenizer.ggml.bos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 3,
        "tokenizer.ggml.add_bos_token": True,
    }


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab abc", ["ab", "▁ab", "c"]),
        ("a bc", ["a", "▁", "bc"]),
        ("a  b", ["a", "  ", "b"]),
        ("c\n\né", ["c", "\n\n", "<0xC3>", "<0xA9>"]),
        ("<eos>a", ["<eos>", "a"]),
    ],
)
def test_pieces_are_joined_by_score(text: str, pieces: list[str]) -> None:
    tokenizer = GEMMA3.tokenizer(vocabulary())
    assert tokenizer.encode(text, add_special_tokens=False).tokens == pieces
    assert tokenizer.encode(text).tokens == ["<bos>", *pieces]
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False) == text


def write_gguf(model: Any, path: Path) -> None:
    """A transformers Gemma 3 as llama.cpp's converter writes it: other names, one added to norms."""
    writer, config = GGUFWriter(path, "gemma3"), model.config
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(1e6)
    writer.add_sliding_window(config.sliding_window)
    writer.add_tokenizer_model("llama")
    known = vocabulary()
    writer.add_token_list(known["tokenizer.ggml.tokens"])
    writer.add_token_scores(known["tokenizer.ggml.scores"])
    writer.add_token_types(known["tokenizer.ggml.token_type"])
    writer.add_add_bos_token(True)
    for name, token in (("bos", 2), ("eos", 1), ("pad", 0), ("unk", 3)):
        getattr(writer, f"add_{name}_token_id")(token)
    parts = {theirs: ours for ours, theirs in GEMMA3.layer_names.items()}
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm"}
    for name, weight in model.state_dict().items():
        owner, kind = name.rsplit(".", 1)
        if owner == "lm_head":
            continue
        if owner not in top:
            layer, part = owner.removeprefix("model.layers.").split(".", 1)
            top[owner] = f"blk.{layer}.{parts[part]}"
        writer.add_tensor(
            f"{top[owner]}.{kind}", (weight + (1 if "norm" in owner else 0)).numpy(), raw_dtype=GGMLQuantizationType.F32
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[int]) -> Any:
    """Install the packages of a model "tiny", whose file is cut at these bytes, and return transformers' model."""
    sizes = {
        "vocab_size": len(VOCABULARY),
        "query_pre_attn_scalar": 16,
        "tie_word_embeddings": True,
        "final_logit_softcapping": None,
    }
    ids = {"bos_token_id": 2, "eos_token_id": 1}
    made = AutoModelForCausalLM.from_pretrained(
        save("gemma3_text", folder / "made", **sizes, **ids), dtype=torch.float32
    )
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16().float()
    write_gguf(made, folder / "tiny.gguf")
    content = (folder / "tiny.gguf").read_bytes()
    packages = tuple(f"tiny_part{number}" for number in range(len(cuts) + 1))
    for package, (first, last) in zip(packages, pairwise([0, *cuts, len(content)]), strict=True):
        (folder / package / "data").mkdir(parents=True)
        (folder / package / "data" / f"tiny.gguf.{package}").write_bytes(content[first:last])
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    monkeypatch.setitem(PACKAGED, "tiny", Packaged(packages, "data/*.gguf.*part*", "pip install tiny"))
    return made


def test_a_file_in_parts_becomes_the_model_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = install(tmp_path, monkeypatch, [5000])
    folder = resolve_model("tiny", tmp_path / "cache")
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in folder.iterdir()} == names
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for name, weight in made.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=0)
    prompt = torch.arange(3, 70).unsqueeze(0)
    with torch.inference_mode():
        torch.testing.assert_close(model(prompt).logits, made(prompt).logits)


@pytest.mark.parametrize("size", [100, 2000, 20_000])
def test_a_full_disk_is_told_and_nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """The configuration does not fit, the tokenizer, or the weights."""
    install(tmp_path, monkeypatch, [])
    cache, limits = tmp_path / "cache", resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        with pytest.raises(ModelError, match=f"cannot convert tiny into {cache} .* make room there or set CACHE_DIR"):
            resolve_model("tiny", cache)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]


@pytest.fixture(scope="module")
def gemma() -> Path:
    """Folder of the packaged model, converted into the user's cache on first use."""
    if any(importlib.util.find_spec(package) is None for package in PACKAGED[NAME].packages):
        pytest.skip(f"not installed: {PACKAGED[NAME].install}")
    from server.settings import Settings  # noqa: PLC0415

    return resolve_model(NAME, Settings().cache_dir)


@pytest.fixture(scope="module")
def tokenizer(gemma: Path) -> Tokenizer:
    return Tokenizer.from_file(str(gemma / "tokenizer.json"))


@pytest.mark.timeout(600)
def test_tokenises_as_llama_cpp(tokenizer: Tokenizer) -> None:
    for text, ids in GOLDEN:
        assert tokenizer.encode(text, add_special_tokens=False).ids == ids
        assert tokenizer.encode(text).ids == [2, *ids]
        assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_configuration_is_the_files(gemma: Path) -> None:
    config = json.loads((gemma / "config.json").read_text())
    assert (
        config["sliding_window"],
        config["num_hidden_layers"],
        config["head_dim"],
        config["tie_word_embeddings"],
    ) == (
        512,
        18,
        256,
        True,
    )
    assert [layer for layer, kind in enumerate(config["layer_types"]) if kind == "full_attention"] == [5, 11, 17]
    assert config["rope_parameters"]["sliding_attention"]["rope_theta"] == 10000.0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_greedy_equals_generate_beyond_the_window(gemma: Path, tokenizer: Tokenizer) -> None:
    many = [
        "The capital of France is",
        "Monday, Tuesday, Wednesday,",
        "\n".join(f"{n} times {n} is {n * n}." for n in range(1, 80)),
    ]
    prompts = [tokenizer.encode(text).ids for text in many]
    assert len(prompts[2]) > 1000
    expected = generate(gemma, prompts, 24)
    assert "city in France" in tokenizer.decode(expected[0]) and "Thursday" in tokenizer.decode(expected[1])
    assert tokenizer.decode(expected[2]).startswith("\n80 times 79 is 6364.\n81 times 81 is"), "as llama.cpp goes on"
    core = make_core(gemma, max_num_tokens=300, kv_cache_memory_mb=128)
    for index, prompt in enumerate(prompts):
        add(core, str(index), prompt)
    deltas = run(core)
    assert [tokens_of(deltas[str(index)]) for index in range(3)] == expected
