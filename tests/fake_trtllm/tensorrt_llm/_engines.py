"""Which engine of ours stands behind an LLM, and what it is told."""

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from engine.config import EmbeddedConfig, EngineConfig, FakeConfig


def engine_config(args: Any) -> EngineConfig:
    """Build the engine's configuration from the LLM's arguments, then FAKE_TRTLLM_CONFIG.

    Raises ValueError if the engine or one of its fields is wrong.
    """
    kind = os.environ.get("FAKE_TRTLLM_ENGINE", "fake")
    if kind not in {"fake", "embedded"}:
        raise ValueError(f"FAKE_TRTLLM_ENGINE must be fake or embedded, not {kind}")
    fields = _fake_fields(args) if kind == "fake" else _embedded_fields(args)
    fields |= json.loads(os.environ.get("FAKE_TRTLLM_CONFIG", "{}"))
    return msgspec.convert({**fields, "type": kind}, FakeConfig | EmbeddedConfig, strict=True)


def _fake_fields(args: Any) -> dict[str, Any]:
    folder, cache = Path(args.model), args.kv_cache_config
    fields: dict[str, Any] = {
        "model": str(args.model),
        "block_size": cache.tokens_per_block,
        "max_num_seqs": args.max_batch_size,
    }
    model = {**read_json(folder / "config.json"), **read_json(folder / "generation_config.json")}
    model |= model.get("text_config", {})
    if isinstance(eos := model.get("eos_token_id"), int):
        eos = [eos]
    known = {"vocab_size": model.get("vocab_size"), "eos_token_ids": eos}
    known["context_length"] = args.max_seq_len or model.get("max_position_embeddings")
    known["num_blocks"] = cache.max_tokens and cache.max_tokens // cache.tokens_per_block
    return fields | {name: value for name, value in known.items() if value is not None}


def _embedded_fields(args: Any) -> dict[str, Any]:
    cache = args.kv_cache_config
    blocks = (cache.max_tokens or 0) // cache.tokens_per_block
    return {
        "model": str(args.model),
        "kv_block_size": cache.tokens_per_block,
        "num_blocks": blocks,
        "enable_block_reuse": cache.enable_block_reuse,
        "max_seq_len": args.max_seq_len or 0,
    }


def read_json(path: Path) -> dict[str, Any]:
    """Content of a file, or nothing if it does not exist."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return content
