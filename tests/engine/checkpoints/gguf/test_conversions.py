"""GGUF files as the model setting: converted once, found again, removed when others need the room; or refused."""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.checkpoints.conversions import ModelError, conversions
from engine.checkpoints.store import present_model, resolve_model
from tests.support.gguf_files import SIZES, byte_level, write_gguf

USE = """
import logging, sys
from pathlib import Path
from engine.checkpoints.store import resolve_model
logging.basicConfig(level="INFO")
for file in sys.argv[2:]:
    print(resolve_model(file, Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def resolve_elsewhere(cache: Path, *files: Path) -> "subprocess.Popen[str]":
    """Resolve in another process, which goes on until its input is closed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen([sys.executable, "-c", USE, cache, *files], text=True, **pipes)  # type: ignore[call-overload]


def folders(cache: Path) -> set[str]:
    return {path.name for path in cache.iterdir() if path.is_dir()}


def test_a_file_is_converted_once_and_found_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampling = {"general.sampling.temp": 0.7, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.1}
    file, cache = write_gguf(tmp_path / "mine.gguf", tied=True, settings=sampling), tmp_path / "cache"
    assert present_model(str(file), cache) is None
    with caplog.at_level("INFO"):
        folder = resolve_model(str(file), cache)
    assert folder.name.startswith("mine-") and f"converting {file}" in caplog.text
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] and config["vocab_size"] == len(byte_level()["tokens"])
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]
    assert (generation["temperature"], generation["top_k"], generation["repetition_penalty"]) == (0.7, 20, 1.1)
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()
    caplog.clear()
    assert resolve_model(str(file), cache) == present_model(str(file), cache) == folder and not caplog.messages
    file.rename(tmp_path / "mine2.gguf")  # its digest tells that it is the same
    os.utime(tmp_path / "mine2.gguf", (1, 1))
    (tmp_path / "mine2.gguf").rename(file)
    assert present_model(str(file), cache) is None and resolve_model(str(file), cache) == folder
    assert present_model(str(file), cache) == folder and [each.source for each in conversions(cache)] == [file]


@pytest.mark.slow
def test_two_processes_convert_once(tmp_path: Path) -> None:
    file, cache = write_gguf(tmp_path / "mine.gguf"), tmp_path / "cache"
    with ThreadPoolExecutor() as pool:
        done = list(pool.map(lambda _: resolve_elsewhere(cache, file).communicate(""), range(2)))
    assert len({out for out, _ in done}) == 1 and sorted(":converting " in err for _, err in done) == [False, True]
    assert folders(cache) == {Path(done[0][0].strip()).name}


@pytest.mark.slow
def test_unused_conversions_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those whose file is gone or has changed go first, then the ones not used for longest; none that is in use."""
    cache = tmp_path / "cache"
    gone, changed, old, recent = (
        write_gguf(tmp_path / f"{name}.gguf", seed=seed)
        for seed, name in enumerate(("gone", "changed", "old", "recent"))
    )
    out, _ = resolve_elsewhere(cache, gone, changed, old, recent).communicate("")
    for seconds, folder in enumerate(out.split()):
        os.utime(Path(folder) / "converted-from.json", (seconds, seconds))
    other = resolve_elsewhere(cache, write_gguf(tmp_path / "used.gguf", seed=8))
    assert other.stdout is not None
    used = Path(other.stdout.readline().strip())
    os.utime(used / "converted-from.json", (0, 0))
    gone.unlink()
    write_gguf(changed, seed=9)
    kinds = lambda: {name.split("-")[0] for name in folders(cache)}  # noqa: E731
    assert kinds() == {"gone", "changed", "old", "recent", "used"}
    resolve_model(str(write_gguf(tmp_path / "new.gguf", seed=10)), cache)
    assert kinds() == {"old", "recent", "used", "new"}

    sizes = shutil.disk_usage(cache)
    needs = 1 << 30  # more than the smallest model: room appears when two are left
    monkeypatch.setattr(
        "engine.checkpoints.conversions.shutil.disk_usage",
        lambda path: sizes._replace(free=needs if len(folders(cache)) < 4 else 0),
    )
    resolve_model(str(write_gguf(tmp_path / "newer.gguf", seed=11)), cache)
    assert kinds() == {"recent", "used", "new", "newer"}
    monkeypatch.setattr("engine.checkpoints.conversions.shutil.disk_usage", lambda path: sizes._replace(free=0))
    with pytest.raises(ModelError, match=rf"takes 0 MB, and {cache} has 0 MB left for it: make room there, or set"):
        resolve_model(str(write_gguf(tmp_path / "newest.gguf", seed=12)), cache)
    assert kinds() == {"used", "new", "newer"}, "what this process and the other one use"
    other.communicate("")


def test_a_killed_conversion_is_begun_again(tmp_path: Path) -> None:
    file, cache = write_gguf(tmp_path / "mine.gguf"), tmp_path / "cache"
    folder = resolve_model(str(file), cache)
    folder.rename(cache / f".{folder.name}.part")
    assert resolve_model(str(file), cache) == folder and folders(cache) == {folder.name}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"architecture": "llama", "settings": {"expert_count": 8}}, "has 8 experts, and mixtures are not supported"),
        ({"settings": {"embedding_length": None}}, r"lacks llama\.embedding_length in its metadata"),
        ({"settings": {"block_count": 4}}, r"lacks the tensor blk\.3\.attn_norm\.weight and 8 more"),
        ({"settings": {"block_count": 2}}, r"has the tensor blk\.2\.attn_norm\.weight, which models"),
        ({"settings": {"feed_forward_length": 97}}, r"ffn_gate\.weight in \S+ has the shape \[96, 64\], .* asks"),
        ({"settings": {"attention.head_count_kv": [2, 2, 1]}}, "the same for all layers, not"),
        ({"settings": {"attention.value_length": 8}}, "value_length in .* is 8, and heads have 16"),
        ({"settings": {"rope.scaling.type": "longrope"}}, "rope.scaling.type in .* is 'longrope'"),
        ({"tensors": {"output_norm.weight": None}}, r"lacks the tensor output_norm\.weight, which"),
        ({"tokenizer": {"tokens": None}}, "lacks a vocabulary"),
        ({"tokenizer": {"pre": "abc"}}, "has the pre-tokenizer 'abc'; supported are default, "),
        ({"tokenizer": {"model": "bert"}}, "has a vocabulary of the kind 'bert'; supported are gpt2, llama"),
        ({"tokenizer": {"merges": None}}, r"lacks tokenizer\.ggml\.merges"),
        ({"tokenizer": {"merges": ["a zzz"]}}, "has a damaged vocabulary"),
        ({"tokenizer": {"token_type": [1, 1]}}, "has a damaged vocabulary"),
    ],
)  # fmt: skip
def test_unsupported_files_are_refused_by_name(tmp_path: Path, changes: dict[str, object], said: str) -> None:
    file = write_gguf(tmp_path / "mine.gguf", **changes)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=said) as refusal:
        resolve_model(str(file), tmp_path / "cache")
    assert str(file) in str(refusal.value)
    assert not any(path.is_dir() for path in (tmp_path / "cache").glob("*"))


def test_an_unknown_architecture_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from engine.checkpoints.gguf.families import GGUF_FAMILIES  # noqa: PLC0415

    monkeypatch.setitem(GGUF_FAMILIES, "mamba", GGUF_FAMILIES["llama"])
    file = write_gguf(tmp_path / "mine.gguf", "mamba")
    monkeypatch.undo()
    with pytest.raises(ModelError, match="has the architecture mamba; supported are llama, qwen2, qwen3, gemma3"):
        resolve_model(str(file), tmp_path)


def test_values_that_are_not_finite_are_named(tmp_path: Path) -> None:
    import numpy as np  # noqa: PLC0415

    bad = np.full(SIZES["hidden"], np.inf, np.float32)
    file = write_gguf(tmp_path / "mine.gguf", tensors={"blk.1.ffn_norm.weight": bad})
    with pytest.raises(ModelError, match=r"the tensor blk\.1\.ffn_norm\.weight in \S+ has values that are not finite"):
        resolve_model(str(file), tmp_path / "cache")
