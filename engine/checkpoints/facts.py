"""The one reader of config.json and generation_config.json. It needs neither torch nor transformers."""

import json
import re
from collections.abc import Mapping
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any

from engine.checkpoints.families import FAMILIES, Config, VisionPart, family_of
from engine.errors import EngineFailure
from engine.kit.checks import ImageTokens

_LANGUAGE_PARTS = ("text_config", "llm_config")
_MEDIA_TOKEN = re.compile("(image|video|audio)_token_(id|index)")
_SIZES = (
    "vocab_size", "max_position_embeddings", "num_hidden_layers", "hidden_size", "intermediate_size",
    "num_attention_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip
_NUMBERS = ("rms_norm_eps", "rope_theta")
_SWITCHES = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window")
_SAMPLING = {"temperature": float | int, "top_p": float | int, "top_k": int, "min_p": float | int}
_SAMPLING["repetition_penalty"] = float | int
_MOST = (1 << 31) - 1
"""Largest size that a configuration may name."""


class ModelFacts:
    """A model's configuration. Of a multimodal model, its language part unless a name says otherwise.

    Values are checked when they are read: EngineFailure names the file and the key that are wrong.
    """

    def __init__(self, config: Config, generation: Config | None = None, folder: Path | str = "the model") -> None:
        """Take the contents of config.json and generation_config.json."""
        self.config = config
        self._generation = generation or {}
        self.folder = folder
        """The folder of config.json, for error messages."""
        self.model_type = self._kind(config, "model_type")
        self.family = family_of(self.model_type)
        self._part = next((name for name in _LANGUAGE_PARTS if config.get(name)), "")
        part = self._section(self._part) if self._part else config
        media = self.family.media
        self.text_type = self._kind(part, self._named("model_type")) if self._part or not media else ""
        if media and not self.text_type:
            self.text_type = media.text_type
        self.text_family = family_of(self.text_type)
        defaults = self.text_family.defaults if self._part or media else {}
        renamed = {key: part[name] for key, name in self.text_family.names.items() if name in part}
        self.text: Config = {**config, **defaults, **part, **renamed, "model_type": self.text_type}
        """The language part's keys, then those of the whole model, such as `quantization_config`."""

    def completed(self, config: Config) -> "ModelFacts":
        """Return the same model's facts, read from its config.json after a library has filled in its defaults."""
        return ModelFacts(config, self._generation, self.folder)

    def with_defaults(self) -> "ModelFacts":
        """Return the same model's facts, with the family's defaults for the keys that its config.json leaves out."""
        return self.completed({**self.text_family.defaults, **self.config})

    def check(self) -> None:
        """Raise EngineFailure now, before weights are loaded, if a value is wrong or one that every engine needs is
        missing."""
        _ = self.vocab_size, self.context_length
        self.check_values()

    def check_values(self) -> None:
        """Raise EngineFailure for a value of a wrong type, and for sizes that do not fit each other. Values that
        config.json leaves out are not looked at: transformers may have defaults for them."""
        present = {key for key in self.text if self.text[key] is not None}
        for key in _SIZES:
            if key in present and not isinstance(self.text[key], list):  # a list has one size for each layer
                self.integer(key)
        for key in _NUMBERS:
            if key in present:
                self.number(key)
        for key in _SWITCHES:
            if key in present and not isinstance(self.text[key], bool):
                raise self._wrong(self._named(key), "true or false", self.text[key])
        kinds = self.text.get("layer_types")
        if kinds is not None and not (isinstance(kinds, list) and all(isinstance(kind, str) for kind in kinds)):
            raise self._wrong(self._named("layer_types"), "a list of strings", kinds)
        _ = self.rope
        self._check_heads(present)
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < (self.vocab_size if "vocab_size" in present else _MOST):
                raise EngineFailure(
                    f"eos_token_id of {self.folder} is {token_id}, which is outside a vocabulary of "
                    f"{self.text.get('vocab_size')} (vocab_size in its config.json)"
                )

    def _check_heads(self, present: set[str]) -> None:
        counts = self.text.get("num_attention_heads"), self.text.get("num_key_value_heads")
        if not isinstance(counts[0], int):
            return
        if isinstance(counts[1], int) and self.heads % self.kv_heads:
            raise self._wrong(
                self._named("num_attention_heads"),
                f"a multiple of {self._named('num_key_value_heads')}, {self.kv_heads}",
                self.heads,
            )
        if "head_dim" not in present and "hidden_size" in present and self.hidden_size % self.heads:
            raise self._wrong(
                self._named("hidden_size"),
                f"a multiple of {self._named('num_attention_heads')}, {self.heads}, unless head_dim is given",
                self.hidden_size,
            )

    @cached_property
    def vocab_size(self) -> int:
        return self.integer("vocab_size")

    @cached_property
    def context_length(self) -> int:
        return self.integer("max_position_embeddings")

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """End-of-sequence token ids: those of generation_config.json, else those of config.json."""
        files = (("generation_config.json", self._generation), ("config.json", self.text))
        for file, content in files:
            value = content.get("eos_token_id")
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if any(type(token_id) is not int for token_id in ids):
                raise EngineFailure(
                    f"eos_token_id in the {file} of {self.folder} must be a token id or a list of them, not {value!r}"
                )
            if ids:
                return tuple(ids)
        return ()

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """Sampling parameters in generation_config.json."""
        found = {name: value for name in _SAMPLING if (value := self._generation.get(name)) is not None}
        for name, value in found.items():
            if isinstance(value, bool) or not isinstance(value, _SAMPLING[name]):
                raise EngineFailure(
                    f"{name} in the generation_config.json of {self.folder} must be a number, not {value!r}"
                )
        return found

    @property
    def layers(self) -> int:
        return self.integer("num_hidden_layers")

    @property
    def hidden_size(self) -> int:
        return self.integer("hidden_size")

    @property
    def heads(self) -> int:
        return self.integer("num_attention_heads")

    @property
    def kv_heads(self) -> int:
        """Number of key-value heads; null in config.json means as many as `heads`."""
        key = "num_key_value_heads"
        return self.heads if key in self.text and self.text[key] is None else self.integer(key)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.heads if self.text.get("head_dim") is None else self.integer("head_dim")

    @property
    def rope(self) -> dict[str, Any]:
        """Parameters of the rotary embedding, `rope_theta` among them. Of `rope_scaling` and `rope_parameters`, which
        newer files have, the former counts, as in transformers: model cards tell people to add it."""
        theta = {"rope_theta": self.text["rope_theta"]} if "rope_theta" in self.text else {}
        for key in ("rope_scaling", "rope_parameters"):
            if self.text.get(key):
                return theta | self._mapping(self.text[key], key)
        return theta

    @property
    def rope_theta(self) -> float:
        """Base of the rotary embedding."""
        return self._number(self.rope.get("rope_theta") or self._value("rope_theta"), "rope_theta")

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding, so that files need not have it."""
        return bool(self.config.get("tie_word_embeddings") or self.text.get("tie_word_embeddings"))

    @property
    def quantized(self) -> bool:
        return self.text.get("quantization_config") is not None

    @property
    def takes_images(self) -> bool:
        """Whether the model takes images, encoded by any engine."""
        return "vision_config" in self.config

    @property
    def no_images(self) -> str:
        """Reason why the embedded engine cannot serve the model with images; empty if it can."""
        if not self.takes_images:
            return "the model takes no images"
        vision = self.family.vision
        if vision is None:
            served = ", ".join(name for name, family in FAMILIES.items() if family.vision)
            return (
                f"images for models of type {self.model_type} are not supported: "
                f"{self.family.no_images or 'only for ' + served}"
            )
        tower = self._section("vision_config").get("model_type", "") or next(iter(vision.tower_types), "")
        if vision.tower_types and tower not in vision.tower_types:
            served = " or ".join(vision.tower_types)
            return f"images for {self.model_type} with a {tower} are not supported: only with {served}"
        return ""

    @property
    def takes_media(self) -> bool:
        """Whether the model takes images or audio, encoded by any engine."""
        return self.takes_images or "audio_config" in self.config

    @property
    def no_media(self) -> str:
        """Reason why the embedded engine can serve the model with neither images nor audio; empty if it can."""
        return "" if self.family.audio else self.no_images

    @property
    def vision(self) -> VisionPart:
        """The family's vision part. Raises EngineFailure with `no_images` if images cannot be served."""
        if objection := self.no_images:
            raise EngineFailure(objection)
        assert self.family.vision is not None
        return self.family.vision

    @property
    def image_tokens(self) -> ImageTokens | None:
        """The prompt tokens that embeddings of media replace; None for a model without media."""
        if (audio := self.family.audio) is not None:
            token_id = self.config.get("audio_token_id", audio.audio_token_id)
            if type(token_id) is not int or token_id < 0:
                raise self._wrong("audio_token_id", "a token id", token_id)
            return ImageTokens(token_id, self.hidden_size)
        vision = self.family.vision
        if vision is None:
            return None
        keys = ("image_token_id", "image_token_index")
        key = next((key for key in keys if self.config.get(key) is not None), "")
        token_id = self.config[key] if key else vision.image_token_id
        if type(token_id) is not int or token_id < 0:
            raise self._wrong(key, "a token id", token_id)
        merge = self._section("vision_config").get("spatial_merge_size", vision.merge) if vision.merge else 0
        if vision.merge and (type(merge) is not int or merge < 1):
            raise self._wrong("vision_config.spatial_merge_size", "a positive integer", merge)
        return ImageTokens(token_id, self.hidden_size, merge, self.video_token_id)

    @property
    def video_token_id(self) -> int:
        """The token of videos; -1 if the model has none."""
        vision = self.family.vision
        token_id = self.config.get("video_token_id")
        if vision is None or vision.video_token_id < 0 or token_id is None:
            return -1 if vision is None else vision.video_token_id
        if type(token_id) is not int or token_id < 0:
            raise self._wrong("video_token_id", "a token id", token_id)
        return token_id

    @property
    def tokens_per_second(self) -> float:
        """Positions of a second of video in mRoPE; 0 counts patches, whatever their time."""
        assert self.family.vision is not None
        default = self.family.vision.tokens_per_second
        found = self._section("vision_config").get("tokens_per_second", default) if default else 0
        return self._number(found, "vision_config.tokens_per_second") if default else 0

    @property
    def media_token_ids(self) -> frozenset[int]:
        """Tokens of a prompt that stand for media: those that config.json names, and the family's default."""
        named = {value for key, value in self.config.items() if _MEDIA_TOKEN.fullmatch(key) and type(value) is int}
        if named:
            return frozenset(named)
        vision, audio = self.family.vision, self.family.audio
        return frozenset({vision.image_token_id} if vision else {audio.audio_token_id} if audio else ())

    def integer(self, key: str) -> int:
        """Return a positive integer of the language part."""
        value = self._value(key)
        if type(value) is not int or value < 1:
            raise self._wrong(self._named(key), "a positive integer", value)
        if value > _MOST:
            raise self._wrong(self._named(key), f"at most {_MOST}", value)
        return value

    def number(self, key: str) -> float:
        """Return a positive number of the language part."""
        return self._number(self._value(key), key)

    def _kind(self, section: Config, key: str) -> str:
        kind = section.get("model_type") or ""
        if not isinstance(kind, str):
            raise self._wrong(key, "a string", kind)
        return kind

    def _number(self, value: object, key: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value <= 0:
            raise self._wrong(self._named(key), "a positive number", value)
        return value

    def _value(self, key: str) -> object:
        if self.text.get(key) is None:
            raise EngineFailure(f"the config.json of {self.folder} has no {self._named(key)}")
        return self.text[key]

    def _section(self, key: str) -> Config:
        return self._mapping(self.config.get(key) or {}, key)

    def _mapping(self, value: object, key: str) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self._wrong(key, "an object", value)
        return dict(value)

    def _named(self, key: str) -> str:
        return f"{self._part}.{key}" if self._part else key

    def _wrong(self, key: str, wanted: str, value: object) -> EngineFailure:
        return EngineFailure(f"{key} in the config.json of {self.folder} must be {wanted}, not {value!r}")


def read_model_facts(folder: Path) -> ModelFacts:
    """Read the facts of the model in `folder`. Raises EngineFailure if a file is missing or is not JSON."""
    config, generation = (_read(folder / name) for name in ("config.json", "generation_config.json"))
    if config is None:
        raise EngineFailure(f"{folder} has no config.json")
    return ModelFacts(config, generation, folder)


def transcribes(folder: Path) -> bool:
    """Return whether the model in `folder` writes down speech, and does nothing else. What is wrong with its files,
    the engine says."""
    try:
        return read_model_facts(folder).family.transcribes
    except EngineFailure:
        return False


def _read(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise EngineFailure(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise EngineFailure(f"{path} must hold a JSON object")
    return content
