"""Make model folders of files with trained weights, without torch.

`merge` makes a model of another one and of weights trained on top of it. The tensors of the trained file are named as
in the new folder. A pair `.lora_down` [rank, inputs] and `.lora_up` [outputs, rank] changes a matrix by its product;
all other tensors are new, or replace one. The file's metadata has `files`, a JSON object of the new folder's other
files by name, and what is added to the vocabulary: `tokens`, a JSON list, or one `image_token`. `renamed` is a JSON
object: the base's tensors that begin with one of its keys are kept, under names that begin with the value instead;
without it, the base is the language model of a LLaVA. `text_config` in config.json overrides the language model's own
configuration.

`unpack` makes a diffusers folder of a file that holds all of it.
"""

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from engine.checkpoints.tensor_file import Progress, TensorFile, bfloat16, write_tensors

_EMBEDDINGS = "embed_tokens.weight"
_DOWN, _UP = ".lora_down", ".lora_up"


def merge(base: Path, trained: Path, folder: Path, progress: Progress) -> None:
    """Write the model that `trained` makes of the one in `base` into an existing `folder`.

    `progress` is called repeatedly with the bytes written so far and in total. Raises ValueError if the two do not
    belong together, OSError if the folder cannot be written.
    """
    added = TensorFile(trained)
    files: dict[str, Any] = json.loads(added.metadata["files"])
    config = files["config.json"]
    language = json.loads((base / "config.json").read_text(encoding="utf-8"))
    config["text_config"] = language.get("text_config", language) | config["text_config"]
    config |= {name: config["text_config"][name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokens = json.loads(added.metadata["tokens"]) if "tokens" in added.metadata else [added.metadata["image_token"]]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    if tokenizer.token_to_id(tokens[0]) not in (config.get("image_token_index"), config.get("image_token_id")):
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
    old = TensorFile(base)
    changes = {name.removesuffix(_DOWN) for name in added.shapes if name.endswith(_DOWN)}
    new = {name: shape for name, shape in added.shapes.items() if not name.endswith((_DOWN, _UP))}
    sources = _renamed(old.shapes, json.loads(added.metadata.get("renamed", '{"": "language_model."}')))
    shapes = {target: old.shapes[source] for target, source in sources.items() if target not in new}
    if unknown := sorted(f"{name}.weight" for name in changes if f"{name}.weight" not in shapes):
        raise ValueError(f"the language model has no {unknown[0]}")
    embeddings = next(name for name in shapes if name.endswith(_EMBEDDINGS))
    old_rows, columns = shapes[embeddings]
    shapes[embeddings] = [rows, columns]

    def blocks() -> Iterator[bytes]:
        for target in shapes:
            name = target.removesuffix(".weight")
            if name in changes:
                change = added.floats(name + _UP) @ added.floats(name + _DOWN)
                yield bfloat16(old.floats(sources[target]) + change)
            else:
                yield old.bits(sources[target]).tobytes()
            if target == embeddings:
                yield bytes(2 * (rows - old_rows) * columns)
        for name in new:
            yield added.bits(name).tobytes()

    write_tensors(path, shapes | new, blocks(), progress)


def _renamed(names: Iterable[str], prefixes: dict[str, str]) -> dict[str, str]:
    """Return the names of the tensors that are kept, by their new names."""
    return {
        new + name.removeprefix(prefix): name
        for name in names
        for prefix, new in prefixes.items()
        if name.startswith(prefix)
    }


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
