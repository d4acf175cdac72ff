"""What a model's folder says that the engine does not: sizes of its vocabulary and context, and the tokens that end a sequence."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineFailure


@dataclass(frozen=True)
class ModelFacts:
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    takes_images: bool = False


def read_model_facts(folder: Path) -> ModelFacts:
    """From config.json, of a multimodal model its language part, and generation_config.json. Raises EngineFailure."""
    config = _read(folder / "config.json")
    if not config:
        raise EngineFailure(f"{folder} has no config.json")
    text = {**config, **(config.get("text_config") or {}), **(config.get("llm_config") or {})}
    eos = _read(folder / "generation_config.json").get("eos_token_id")
    eos = text.get("eos_token_id") if eos is None else eos
    try:
        return ModelFacts(
            vocab_size=text["vocab_size"],
            max_position_embeddings=text["max_position_embeddings"],
            eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
            takes_images="vision_config" in config,
        )
    except KeyError as error:
        raise EngineFailure(f"the config.json of {folder} has no {error.args[0]}") from error


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return content
