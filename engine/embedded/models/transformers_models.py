"""Parts of a checkpoint that transformers knows: its complete configuration, its class, its weights.

The tower of a model that takes media runs elsewhere; the embeddings that it computes come with the requests.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import transformers
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    modeling_utils,
)
from transformers.configuration_utils import PreTrainedConfig
from transformers.utils import logging as transformers_logging

from engine.checkpoints.facts import ModelFacts, read_model_facts
from engine.checkpoints.families import family_of
from engine.checkpoints.headers import check_headers, place, read_headers, some
from engine.embedded.models.checkpoint import is_finite
from engine.errors import EngineFailure

_PARAGRAPH = "\n\n"
log = logging.getLogger(__name__)


def load_config(folder: str) -> tuple[PreTrainedConfig, ModelFacts]:
    """Return transformers' configuration, and the facts with its defaults filled in. Raises EngineFailure."""
    facts = read_model_facts(Path(folder))
    facts.check_values()
    if facts.model_type not in CONFIG_MAPPING:
        known = f"transformers {transformers.__version__} does not know"
        raise EngineFailure(f"model_type in the config.json of {folder} is {facts.model_type!r}, which {known}")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        text = config.get_text_config()
        renamed = {name: getattr(text, name) for name in text.attribute_map}  # GPT-2's n_positions, for example
        completed = facts.completed(config.to_dict() | {"text_config": text.to_dict() | renamed})
    except EngineFailure:
        raise
    except Exception as error:  # its classes stumble over wrong values in many ways
        raise EngineFailure(f"transformers cannot use the config.json of {folder}: {_brief(error)}") from error
    completed.check()
    return config, completed


@contextlib.contextmanager
def _allocated_one_by_one() -> Iterator[None]:
    """Keep transformers from allocating the memory of all weights at once on a GPU. torch gives an allocation back when
    nothing is left in it: any tensor that was made in between would keep what all weights took, once these have moved
    (into shared memory, or into memory that a sleep releases)."""
    allocate_all = modeling_utils.caching_allocator_warmup
    modeling_utils.caching_allocator_warmup = lambda *_: None
    try:
        yield
    finally:
        modeling_utils.caching_allocator_warmup = allocate_all


def load_weights(
    auto: Any,
    folder: str,
    facts: ModelFacts,
    *,
    needs: Callable[[str], bool] = lambda name: True,
    uses: Callable[[str], bool] = lambda name: True,
    **options: Any,
) -> Any:
    """Return the model that an automatic class of transformers makes of a folder, ready for inference.

    Every parameter that `needs` accepts by its name comes from the files, in the configured shape, and is finite; else
    this raises EngineFailure. One warning lists the tensors in the files that the model does not have, as far as `uses`
    accepts their names.
    """
    stored = read_headers(Path(folder))
    check_headers(facts, stored)
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    loader = logging.getLogger("transformers.modeling_utils")
    loader.addFilter(_is_no_report)
    try:
        with _allocated_one_by_one():
            module, report = auto.from_pretrained(
                folder,
                local_files_only=True,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
    except Exception as error:  # likewise
        raise EngineFailure(f"transformers cannot load {folder}: {_brief(error)}") from error
    finally:
        loader.removeFilter(_is_no_report)
    for name, found, wanted in sorted(report["mismatched_keys"]):
        if needs(name):
            raise EngineFailure(
                f"{place(stored, name)} has the shape {list(found)}, and config.json asks for {list(wanted)}"
            )
    unused = [name for name in report["unexpected_keys"] if uses(name)]
    if lost := [name for name in report["missing_keys"] if needs(name)]:
        others = f", and have others that it does not use, {some(unused)}" if unused else ""
        raise EngineFailure(f"the safetensors of {folder} lack what the model needs, {some(lost)}{others}")
    if unused:
        log.warning("the model does not use all that %s has: %s", folder, some(unused))
    for name, parameter in module.named_parameters():
        if needs(name) and not is_finite(parameter.detach()):
            raise EngineFailure(f"{place(stored, name)} has values that are not finite")
    return module.eval()


def _is_no_report(record: logging.LogRecord) -> bool:
    """Drop transformers' report of a load: what it tells is an error or a warning of ours."""
    return "LOAD REPORT" not in record.getMessage()


def _brief(error: Exception) -> str:
    """Return the first paragraph of an error on one line: transformers' further ones advise what breaks our pins."""
    return f"{type(error).__name__}: {' '.join(str(error).strip().partition(_PARAGRAPH)[0].split())}"


def auto_class(config: PreTrainedConfig) -> Any:
    """Return transformers' automatic class for this model. Raises EngineFailure for a model that it cannot load."""
    family = family_of(config.model_type)
    auto: Any = AutoModelForImageTextToText if family.vision else AutoModelForCausalLM
    if family.audio:
        auto = AutoModelForSeq2SeqLM
    if type(config) not in auto._model_mapping:
        raise EngineFailure(f"models of type {config.model_type} generate no text: transformers has no class that does")
    model = auto._model_mapping[type(config)]
    if family.audio and config.tie_word_embeddings:  # which transformers ignores in this class
        model._tied_weights_keys = {"lm_head.weight": "model.language_model.embed_tokens.weight"}
    return auto


def drop_tower(module: Any) -> Any:
    """Remove what computes embeddings of media from a loaded model, and return the model."""
    if part := family_of(module.config.model_type).media:
        for name in part.tower:
            setattr(module.model, name, None)
    return module
