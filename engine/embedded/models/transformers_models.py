"""Facts of a checkpoint that transformers knows: its complete configuration, its class, its language part.

The vision tower of a vision-language model runs elsewhere; the embeddings that it computes come with the requests.
"""

from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.configuration_utils import PreTrainedConfig

from engine.checkpoints.facts import ModelFacts, read_model_facts
from engine.checkpoints.families import family_of
from engine.errors import EngineFailure


def load_config(folder: str) -> tuple[PreTrainedConfig, ModelFacts]:
    """Return transformers' configuration, and the facts with its defaults filled in. Raises EngineFailure."""
    facts = read_model_facts(Path(folder))
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, StrictDataclassError) as error:
        raise EngineFailure(f"transformers cannot use the config.json of {folder}: {error}") from error
    text = config.get_text_config()
    renamed = {name: getattr(text, name) for name in text.attribute_map}  # GPT-2's n_positions, for example
    return config, facts.completed(config.to_dict() | {"text_config": text.to_dict() | renamed})


def auto_class(config: PreTrainedConfig) -> Any:
    """Return the automatic class of transformers that loads this model."""
    return AutoModelForImageTextToText if family_of(config.model_type).vision else AutoModelForCausalLM


def drop_tower(module: Any) -> Any:
    """Remove what computes embeddings of images from a loaded model, and return the model."""
    if vision := family_of(module.config.model_type).vision:
        for name in vision.tower:
            setattr(module.model, name, None)
    return module
