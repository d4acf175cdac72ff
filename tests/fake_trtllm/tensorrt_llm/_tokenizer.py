"""The tokenizer of a model folder, as far as the LLM itself needs one."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend

from tensorrt_llm._engines import read_json


class Tokenizer:
    """Has the end-of-sequence ids of the model's configuration.

    The first is its own, the others are those of `generation_config`.
    """

    def __init__(self, folder: Path) -> None:
        self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        model = {**read_json(folder / "config.json"), **read_json(folder / "generation_config.json")}
        eos = model.get("eos_token_id")
        self.eos_token_ids: list[int] = eos if isinstance(eos, list) else [] if eos is None else [eos]
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else None
        self.pad_token_id = model.get("pad_token_id", self.eos_token_id)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens))


def load_tokenizer(args: Any) -> Any:
    """The tokenizer the LLM was given, or that of its folder; None if there is none or it is to be skipped."""
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer is not None and not isinstance(args.tokenizer, str | Path):
        return args.tokenizer
    folder = Path(args.tokenizer or args.model)
    return Tokenizer(folder) if (folder / "tokenizer.json").is_file() else None


def check_guided(args: Any, tokenizer: Any) -> None:
    """Raise what a worker raises at its start if it cannot guide: `_xgrammar_tokenizer_info`, `create_py_executor`."""
    backend, speculative = args.guided_decoding_backend, args.speculative_config
    if backend is None or args.mm_encoder_only:
        return
    mode = type(speculative).__name__
    if mode in ("MedusaDecodingConfig", "LookaheadDecodingConfig"):
        raise ValueError(f"Guided decoding is not supported for speculative decoding mode: {mode}.")
    folder = Path(args.model)
    if args.skip_tokenizer_init and folder.is_dir():
        raise AssertionError("the tokenizer is None")
    classes = read_json(folder / "tokenizer_config.json").get("auto_map", {}).get("AutoTokenizer")
    if classes is None or (isinstance(classes, list) and classes[1:] and classes[1]):
        return  # a fast tokenizer
    if not any(folder.glob("*tiktoken*")):
        raise ValueError(f"Unsupported tokenizer type: {classes}")
    if backend == "llguidance":
        raise ValueError("missing tokenizer_str")


def set_up(params: Any, tokenizer: Any) -> None:
    """Fill in, in place, what SamplingParams leaves to the tokenizer.

    With an explicit `end_id` nothing is filled in, and stop strings are an error.
    """
    if params.end_id is not None:
        for name in ("stop", "bad"):
            if getattr(params, name) is not None:
                raise RuntimeError(
                    f"SamplingParams.{name} ({getattr(params, name)}) is not processed by tokenizer, "
                    "please call the setup method."
                )
        return
    if tokenizer is None:
        raise ValueError(
            "tokenizer is required to reset end_id if it is None, "
            "or you can explicitly specify the end_id for SamplingParams"
        )
    params.end_id = tokenizer.eos_token_id
    params.pad_id = tokenizer.pad_token_id if params.pad_id is None else params.pad_id
    if more := [token for token in tokenizer.eos_token_ids if token != params.end_id and not params.ignore_eos]:
        params.stop_token_ids = [*(params.stop_token_ids or ()), *more]
    params._bad_word_ids = _encoded(params.bad, tokenizer)
    params._stop_word_ids = _encoded(params.stop, tokenizer)


def _encoded(words: Any, tokenizer: Any) -> list[list[int]] | None:
    if words is None:
        return None
    return [tokenizer.encode(word, add_special_tokens=False) for word in ([words] if isinstance(words, str) else words)]
