"""Whisper models of CTranslate2 become folders in Hugging Face format."""

import hashlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.checkpoints.conversions import ModelError
from engine.checkpoints.packaged import PACKAGED, WHISPER, Packaged, installed_files
from engine.checkpoints.store import resolve_model
from engine.checkpoints.whisper import read_sizes, read_tokens
from engine.errors import EngineFailure
from tests.support.whisper_models import build_whisper, write_ctranslate2


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package in the place of the one that Whisper's weights come from: the folder of its model.bin."""
    build_whisper(tmp_path / "source", multilingual=False)
    folder = tmp_path / "noter" / "model"
    write_ctranslate2(folder, tmp_path / "source")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}
    known = Packaged(
        ("noter",),
        "model/model.bin",
        ("noter==1",),
        digests["model.bin"],
        beside=tuple((name, digests[name]) for name in ("config.json", "tokenizer.json")),
    )
    monkeypatch.setitem(PACKAGED, WHISPER, known)
    return folder


def test_weights_and_tokens_are_those_of_the_folder_it_was_made_of(package: Path, tmp_path: Path) -> None:
    folder, source = resolve_model(WHISPER, tmp_path / "cache"), tmp_path / "source"
    found, wanted = (load_file(path / "model.safetensors") for path in (folder, source))
    wanted.pop("proj_out.weight", None)
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name].half()) for name in wanted)
    assert read_sizes(folder) == read_sizes(source)
    assert read_tokens(folder) == replace(read_tokens(source), median_width=7), "Whisper's own, which no file names"
    heads = [json.loads((path / "generation_config.json").read_text())["alignment_heads"] for path in (folder, source)]
    assert heads[0] == heads[1]


def test_files_that_were_not_tested_are_refused(package: Path, tmp_path: Path) -> None:
    (package / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"the tokenizer.json of whisper-tiny.en are not those that were tested"):
        resolve_model(WHISPER, tmp_path / "cache")


@pytest.mark.parametrize("damage", ["cut", "version"])
def test_a_damaged_file_is_refused(package: Path, tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = package / "model.bin"
    content = file.read_bytes()
    file.write_bytes(content[:1000] if damage == "cut" else b"\5" + content[1:])
    known = PACKAGED[WHISPER]._replace(sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    monkeypatch.setitem(PACKAGED, WHISPER, known)
    with pytest.raises(ModelError, match=r"cannot convert whisper-tiny.en: .* (is cut off|is not a Whisper model)"):
        resolve_model(WHISPER, tmp_path / "cache")


def test_a_tokenizer_without_the_tokens_is_refused(tmp_path: Path) -> None:
    for name in ("generation_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(EngineFailure, match="lack a token of Whisper"):
        read_tokens(tmp_path)


def test_the_real_package(tmp_path: Path) -> None:
    """tiny.en, where it is installed."""
    if not installed_files(WHISPER):
        pytest.skip(f"not here: {PACKAGED[WHISPER].install}")
    folder = resolve_model(WHISPER, tmp_path)
    sizes, tokens = read_sizes(folder), read_tokens(folder)
    assert (sizes.bins, sizes.width, sizes.encoder_layers, sizes.vocab_size) == (80, 384, 4, 51864)
    assert (tokens.start, tokens.end, tokens.no_timestamps, tokens.multilingual) == (50257, 50256, 50362, False)
