"""Merge a language model with the weights trained on top of it into a folder of a model for media, without torch.

The trained file's tensors are named as in the new folder. A pair `.lora_down` [rank, inputs] and `.lora_up` [outputs,
rank] changes a matrix by its product; all other tensors are new. The file's metadata has `files`, a JSON object of the
new folder's other files by name, and `image_token` or `media_token`, a token that is added to the vocabulary.
`text_config` in its config.json overrides the language model's own configuration. `taken` is a JSON object of tensors
that come from another model: by their new names, the old name and the shape, whose first rows are taken.
"""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from engine.checkpoints.tensor_file import Progress, TensorFile, bfloat16, write_tensors

_EMBEDDINGS = "model.embed_tokens.weight"
_DOWN, _UP = ".lora_down", ".lora_up"


def merge(base: Path, trained: Path, folder: Path, progress: Progress, other: Path | None = None) -> None:
    """Write the model that `trained` makes of the language model in `base` into an existing `folder`.

    `other` is the folder of the model from which tensors are taken.

    `progress` is called repeatedly with the bytes written so far and in total. Raises ValueError if the two do not
    belong together, OSError if the folder cannot be written.
    """
    added = TensorFile(trained)
    files: dict[str, Any] = json.loads(added.metadata["files"])
    config = files["config.json"]
    config["text_config"] = json.loads((base / "config.json").read_text(encoding="utf-8")) | config["text_config"]
    config |= {name: config["text_config"][name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    token = added.metadata.get("media_token") or added.metadata["image_token"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False)])
    if tokenizer.token_to_id(token) != config.get("audio_token_id", config.get("image_token_index")):
        raise ValueError(f"{trained} was trained with another vocabulary than that of {base}")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    for name in ("generation_config.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, folder / name)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    source = TensorFile(other / "model.safetensors") if other else added
    _write_weights(
        TensorFile(base / "model.safetensors"),
        added,
        source,
        config["text_config"]["vocab_size"],
        folder / "model.safetensors",
        progress,
    )


def _write_weights(
    language: TensorFile, added: TensorFile, source: TensorFile, rows: int, path: Path, progress: Progress
) -> None:
    taken: dict[str, tuple[str, list[int]]] = json.loads(added.metadata.get("taken", "{}"))
    changes = {name.removesuffix(_DOWN) for name in added.shapes if name.endswith(_DOWN)}
    new = {name: shape for name, shape in added.shapes.items() if not name.endswith((_DOWN, _UP))}
    shapes = {f"language_model.{name}": shape for name, shape in language.shapes.items()}
    if unknown := sorted(f"{name}.weight" for name in changes if f"{name}.weight" not in shapes):
        raise ValueError(f"the language model has no {unknown[0]}")
    old_rows, columns = language.shapes[_EMBEDDINGS]
    shapes[f"language_model.{_EMBEDDINGS}"] = [rows, columns]

    def blocks() -> Iterator[bytes]:
        for name in language.shapes:
            target = f"language_model.{name}".removesuffix(".weight")
            if target in changes:
                change = added.floats(target + _UP) @ added.floats(target + _DOWN)
                yield bfloat16(language.floats(name) + change)
            else:
                yield language.bits(name).tobytes()
            if name == _EMBEDDINGS:
                yield bytes(2 * (rows - old_rows) * columns)
        for name in new:
            yield added.bits(name).tobytes()
        for name, shape in taken.values():
            yield source.bits(name)[: shape[0]].tobytes()

    write_tensors(path, shapes | new | {name: shape for name, (_, shape) in taken.items()}, blocks(), progress)
