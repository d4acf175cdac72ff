"""Tiny Whisper models with random weights, whose windows are two seconds, and sounds for them."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

WINDOW_SECONDS = 2
LANGUAGES = ("en", "de", "ja")
_BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
_SPECIAL = (
    "<|endoftext|>", "<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>",
    "<|transcribe|>", "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>",
)  # fmt: skip
TOKENS = {text: len(_BYTES) + place for place, text in enumerate(_SPECIAL)}
FIRST_TIMESTAMP = TOKENS["<|notimestamps|>"] + 1
VOCABULARY = FIRST_TIMESTAMP + 50 * WINDOW_SECONDS + 1


def build_whisper(folder: Path, *, multilingual: bool = True, bins: int = 80, seed: int = 0) -> Path:
    """Fill a folder like a checkpoint's, and return it."""
    torch.manual_seed(seed)
    ends = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), TOKENS["<|endoftext|>"])
    start = {"decoder_start_token_id": TOKENS["<|startoftranscript|>"]}
    config = WhisperConfig(
        vocab_size=VOCABULARY, num_mel_bins=bins, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=40,
        max_source_positions=50 * WINDOW_SECONDS, max_target_positions=64, init_std=0.3, median_filter_width=3,
        suppress_tokens=None, begin_suppress_tokens=None, **ends, **start,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(**ends, **start)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps(ends | start | _generation(multilingual)))
    WhisperFeatureExtractor(feature_size=bins, chunk_length=WINDOW_SECONDS).save_pretrained(folder)
    byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "WhisperTokenizer"}')
    return folder


def _generation(multilingual: bool) -> dict[str, Any]:
    tasks = {
        "lang_to_id": {f"<|{code}|>": TOKENS[f"<|{code}|>"] for code in LANGUAGES},
        "task_to_id": {task: TOKENS[f"<|{task}|>"] for task in ("transcribe", "translate")},
    }
    spoken = {_BYTES.index(letter) for letter in "abcdefghijklmnopqrstuvwxyz\u0120"}  # the last is a space
    spoken |= {TOKENS["<|endoftext|>"], TOKENS["<|notimestamps|>"]}
    return {
        "suppress_tokens": sorted({*range(FIRST_TIMESTAMP)} - spoken),
        "begin_suppress_tokens": [_BYTES.index("\u0120"), TOKENS["<|endoftext|>"]],
        "no_timestamps_token_id": TOKENS["<|notimestamps|>"],
        "prev_sot_token_id": TOKENS["<|startofprev|>"],
        "max_initial_timestamp_index": 50,
        "alignment_heads": [[0, 1], [1, 0]],
        "is_multilingual": multilingual,
        "max_length": 64,
        **(tasks if multilingual else {}),
    }


def byte_level() -> Tokenizer:
    """Return the tokenizer of these models: a token for each byte."""
    tokenizer = Tokenizer(models.BPE(vocab={text: place for place, text in enumerate(_BYTES)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _SPECIAL])
    return tokenizer


def speech(seconds: float, seed: int = 0) -> np.ndarray:
    """Return what is no speech, but differs from moment to moment: samples at 16 kHz."""
    noise = np.random.default_rng(seed)
    time = np.arange(int(16000 * seconds)) / 16000
    pitch = 200 + 150 * np.sin(2 * np.pi * time * 1.3 + seed)
    loud = 0.2 + 0.2 * np.sin(2 * np.pi * time * 3.1) ** 2
    tone = np.sin(2 * np.pi * np.cumsum(pitch) / 16000)
    return (loud * tone + 0.02 * noise.normal(size=time.size)).astype(np.float32)


def write_ctranslate2(folder: Path, source: Path) -> Path:
    """Write a Whisper folder as CTranslate2 has it, in float16, and return its model.bin."""
    weights = WhisperForConditionalGeneration.from_pretrained(source, dtype=torch.float16).state_dict()
    config = json.loads((source / "config.json").read_text())
    variables = dict(_ctranslate2(weights, config))
    text = lambda name: struct.pack("<H", len(name) + 1) + name.encode() + b"\0"  # noqa: E731
    content = struct.pack("<I", 6) + text("WhisperSpec") + struct.pack("<II", 3, len(variables))
    for name, values in sorted(variables.items()):
        kind = {"float16": 4, "int16": 2}[str(values.dtype)]
        content += text(name) + struct.pack(f"<B{values.ndim}I", values.ndim, *values.shape)
        content += struct.pack("<BI", kind, values.nbytes) + values.tobytes()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_bytes(content + struct.pack("<I", 0))
    generation = json.loads((source / "generation_config.json").read_text())
    own = {
        "suppress_ids": generation["suppress_tokens"],
        "suppress_ids_begin": generation["begin_suppress_tokens"],
        "alignment_heads": generation["alignment_heads"],
        "lang_ids": [],
    }
    (folder / "config.json").write_text(json.dumps(own))
    (folder / "tokenizer.json").write_bytes((source / "tokenizer.json").read_bytes())
    return folder / "model.bin"


def _ctranslate2(weights: dict[str, torch.Tensor], config: dict[str, Any]) -> Any:
    """Yield the names and values of CTranslate2's variables: its converter for transformers, the other way round."""

    def tensor(name: str, like: str = "") -> np.ndarray:
        return (weights[name] if name in weights else torch.zeros_like(weights[like])).numpy()

    def linear(there: str, *names: str) -> Any:
        yield f"{there}/weight", np.concatenate([tensor(f"{name}.weight") for name in names])
        biases = [tensor(f"{name}.bias", f"{name.replace('k_proj', 'q_proj')}.bias") for name in names]
        yield f"{there}/bias", np.concatenate(biases)

    def norm(there: str, name: str) -> Any:
        yield f"{there}/gamma", tensor(f"{name}.weight")
        yield f"{there}/beta", tensor(f"{name}.bias")

    for side in ("encoder", "decoder"):
        yield f"{side}/num_heads", np.array(config[f"{side}_attention_heads"], np.int16)
        yield f"{side}/position_encodings/encodings", tensor(f"model.{side}.embed_positions.weight")
        yield from norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for layer in range(config[f"{side}_layers"]):
            there, here = f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"
            own = f"{here}.self_attn"
            yield from norm(f"{there}/self_attention/layer_norm", f"{own}_layer_norm")
            yield from linear(f"{there}/self_attention/linear_0", *(f"{own}.{part}_proj" for part in "qkv"))
            yield from linear(f"{there}/self_attention/linear_1", f"{own}.out_proj")
            if side == "decoder":
                cross = f"{here}.encoder_attn"
                yield from norm(f"{there}/attention/layer_norm", f"{cross}_layer_norm")
                yield from linear(f"{there}/attention/linear_0", f"{cross}.q_proj")
                yield from linear(f"{there}/attention/linear_1", f"{cross}.k_proj", f"{cross}.v_proj")
                yield from linear(f"{there}/attention/linear_2", f"{cross}.out_proj")
            yield from norm(f"{there}/ffn/layer_norm", f"{here}.final_layer_norm")
            for part in (0, 1):
                yield from linear(f"{there}/ffn/linear_{part}", f"{here}.fc{part + 1}")
    yield "decoder/embeddings/weight", tensor("model.decoder.embed_tokens.weight")
    for name in ("conv1", "conv2"):
        yield f"encoder/{name}/weight", tensor(f"model.encoder.{name}.weight")
        yield f"encoder/{name}/bias", tensor(f"model.encoder.{name}.bias")
