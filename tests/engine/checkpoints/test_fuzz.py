"""Damaged checkpoints: whatever a folder holds, it is refused by name or served as transformers computes it.

A process of its own loads them, since a value that reaches compiled code unchecked would end it. Seeds are fixed.
"""

import json
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.config import EmbeddedConfig
from engine.embedded.models.load import load_runner
from engine.errors import EngineFailure
from tests.support.steps import Part, step_of
from tests.support.waiting import slowness

TOKENS = [3, 200, 17, 44, 300, 5, 9]
VALUES: list[Any] = [
    None, 0, -1, 1, 2, 3, 5, 7, 32, 64, 331, 10**6, 10**12, 10**30, 0.5, -2.5, 1e30, float("nan"), float("inf"),
    "", "abc", "llama", True, False, [], [1], ["full_attention"], {}, {"rope_type": "abc"}, {"rope_theta": "abc"},
    {"rope_type": "default", "rope_theta": 5e4},
]  # fmt: skip
KEYS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_parameters", "rope_theta",
    "rope_scaling", "hidden_act", "tie_word_embeddings", "attention_bias", "mlp_bias", "eos_token_id", "layer_types",
    "sliding_window", "quantization_config", "text_config", "vision_config", "dtype", "architectures", "auto_map",
    "partial_rotary_factor", "num_nextn_predict_layers",
)  # fmt: skip
CASES = 32


def outcome(folder: Path, attention: str) -> str | torch.Tensor:
    """Load a folder: why it is refused, or its logits, as in a server."""
    torch.set_num_threads(1)
    try:
        runner = load_runner(
            EmbeddedConfig(
                dtype="float32",  # levels that round activations give other logits
                model=str(folder),
                device="cpu",
                attention=attention,
                num_blocks=4,
                threads=1,
                max_seq_len=64,
            )
        )
    except EngineFailure as error:
        return str(error)
    return runner.forward(step_of([Part(TOKENS, [0], 0, len(TOKENS))])).float()


def reference(folder: Path) -> torch.Tensor | None:
    """transformers' own logits; None if it does not load the folder."""
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        with torch.inference_mode():
            logits: torch.Tensor = model(torch.tensor([TOKENS])).logits[0]
    except Exception:  # it fails in many ways
        return None
    return logits


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=331, hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=512, eos_token_id=2,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("whole")
    AutoModelForCausalLM.from_config(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def worker() -> Iterator[ProcessPoolExecutor]:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        yield pool


def change_config(folder: Path, rng: random.Random) -> str:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    key = rng.choice(KEYS)
    if rng.random() < 0.1:
        config.pop(key, None)
        path.write_text(json.dumps(config))
        return f"without {key}"
    config[key] = rng.choice(VALUES)
    path.write_text(json.dumps(config))
    return f"{key}={config[key]!r}"


def change_header(folder: Path, rng: random.Random) -> str:
    """Change one tensor's entry in the header, whose other offsets stay."""
    path = folder / "model.safetensors"
    content = path.read_bytes()
    (size,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + size])
    name = rng.choice(sorted(header.keys() - {"__metadata__"}))
    entry = header[name]
    first, last = entry["data_offsets"]
    change = rng.choice(
        [
            lambda: entry.update(shape=entry["shape"][::-1]),
            lambda: entry.update(shape=[*entry["shape"], 1]),
            lambda: entry.update(shape=[2 * entry["shape"][0], *entry["shape"][1:]]),
            lambda: entry.update(shape=[entry["shape"][0] // 2, 2, *entry["shape"][1:]]),
            lambda: entry.update(shape=[rng.choice([0, -1, 1 << 40, 1 << 62, "a", None])]),
            lambda: entry.update(dtype=rng.choice(["I16", "U16", "F16", "F32", "BOOL", "F8_E4M3", "X", None])),
            lambda: entry.update(data_offsets=[first + rng.choice([-2, 2]), last]),
            lambda: entry.update(data_offsets=[first, last + rng.choice([-2, 2, 1 << 60])]),
            lambda: entry.update(data_offsets=[last, first]),
            lambda: header.update({name + rng.choice("_1"): header.pop(name)}),
            lambda: header.update({name.replace("layers.1.", "layers.7."): header.pop(name)}),
            lambda: header.pop(name),
        ]
    )
    change()
    encoded = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded)) + encoded + content[8 + size :])
    return f"{name}: {header.get(name)}"


def change_bytes(folder: Path, rng: random.Random) -> str:
    """Cut the file off, or overwrite some bytes of its header."""
    path = folder / "model.safetensors"
    content = bytearray(path.read_bytes())
    if rng.random() < 0.3:
        end = rng.randrange(len(content))
        path.write_bytes(content[:end])
        return f"{end} bytes"
    place, count = rng.randrange(8 + struct.unpack("<Q", content[:8])[0]), rng.choice([1, 8])
    content[place : place + count] = rng.randbytes(count)
    path.write_bytes(content)
    return f"{count} random bytes at {place}"


@pytest.mark.parametrize("change", [change_config, change_header, change_bytes])
def test_a_damaged_checkpoint_is_refused_by_name_or_served_right(
    folder: Path, worker: ProcessPoolExecutor, tmp_path: Path, change: Callable[[Path, random.Random], str]
) -> None:
    whole, wrong, outcomes = reference(folder), [], set()
    assert whole is not None
    for seed in range(CASES):
        shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
        what = f"seed {seed}, {change(tmp_path, random.Random(seed))}"
        expected = reference(tmp_path)
        for attention in ("auto", "sdpa"):
            found = worker.submit(outcome, tmp_path, attention).result(120 * slowness())  # raises if the process died
            outcomes.add(type(found))
            if isinstance(found, str):
                if str(tmp_path) not in found:
                    wrong.append(f"{what}, {attention}: no file is named in {found}")
                continue
            near = whole if expected is None else expected
            if not torch.allclose(found, near, rtol=1e-3, atol=1e-3 * float(near.abs().max())):
                wrong.append(f"{what}, {attention}: other logits than those of transformers")
    assert not wrong, "\n".join(wrong)
    assert str in outcomes
