"""Make model folders of files with trained weights, without torch.

`merge` makes a vision-language model of a language model and of weights trained on top of it. The tensors of the
trained file are named as in the new folder. A pair `.lora_down` [rank, inputs] and `.lora_up` [outputs, rank] changes a
matrix by its product; all other tensors are new. The file's metadata has `files`, a JSON object of the new folder's
other files by name, and `image_token`, a token that is added to the vocabulary. `text_config` in its config.json
overrides the language model's own configuration.

`unpack` makes a diffusers folder of a file that holds all of it.
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


def merge(base: Path, trained: Path, folder: Path, progress: Progress) -> None:
    """Write the vision-language model that `trained` makes of the language model in `base` into an existing `folder`.

    `progress` is called repeatedly with the bytes written so far and in total. Raises ValueError if the two do not
    belong together, OSError if the folder cannot be written.
    """
    added = TensorFile(trained)
    files: dict[str, Any] = json.loads(added.metadata["files"])
    config = files["config.json"]
    config["text_config"] = json.loads((base / "config.json").read_text(encoding="utf-8")) | config["text_config"]
    config |= {name: config["text_config"][name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(added.metadata["image_token"], special=True, normalized=False)])
    if tokenizer.token_to_id(added.metadata["image_token"]) != config["image_token_index"]:
        raise ValueError(f"{trained} was trained with another vocabulary than that of {base}")
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    for name in ("generation_config.json", "tokenizer_config.json"):
        shutil.copyfile(base / name, folder / name)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=2) + "\n"
        (folder / name).write_text(text, encoding="utf-8")
    _write_weights(
        base / "model.safetensors", added, config["text_config"]["vocab_size"], folder / "model.safetensors", progress
    )


def _write_weights(base: Path, added: TensorFile, rows: int, path: Path, progress: Progress) -> None:
    language = TensorFile(base)
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

    write_tensors(path, shapes | new, blocks(), progress)


def unpack(packed: Path, folder: Path, progress: Progress) -> None:
    """Write the diffusers folder that a file holds into an existing `folder`.

    Tensors are named by their file in the folder and their name there, as in `vae/model.safetensors/encoder.weight`.
    The file's metadata has `files`, a JSON object of the folder's other files by name. Raises OSError if the folder
    cannot be written.
    """
    held = TensorFile(packed)
    for name, text in json.loads(held.metadata["files"]).items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    parts: dict[str, dict[str, list[int]]] = {}
    for name, shape in held.shapes.items():
        part, tensor = name.rsplit("/", 1)
        parts.setdefault(part, {})[tensor] = shape
    for part, shapes in parts.items():
        blocks = (held.bits(f"{part}/{tensor}").tobytes() for tensor in shapes)
        write_tensors(folder / part, shapes, blocks, progress)
