"""smolaudio's questions and weights: training sees what the server makes of a file, and weights merge as trained."""

import io
import json
import shutil
from collections import Counter
from pathlib import Path
from random import Random

import numpy as np
import pytest
import soundfile
import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AudioFlamingo3ForConditionalGeneration, AutoConfig, AutoModel, LlamaConfig, LlamaForCausalLM

from engine.checkpoints.merge import merge
from engine.config import EncoderConfig
from engine.embedded.vision.batches import BatchEncoder
from engine.media import EncodedMedia, MediaInput
from engine.transfer.shared_bytes import readable
from multimodal.text.templates import ChatTemplate
from smolaudio.architecture import ENCODER, save
from smolaudio.batches import Batch, spoken_tokens
from smolaudio.conversations import AUDIO_TOKEN, AUDIO_TOKEN_ID, TEMPLATE, Encoder, audio_tokens, make_chat
from smolaudio.model import Student
from smolaudio.questions import HELD_OUT, KINDS, ask, kinds_of, lexicon, make_saying
from smolaudio.speech import HELD_OUT_SPEEDS, HELD_OUT_VARIANTS, RATE, SECONDS, Voice, make_voice
from tests.support.sounds import sound


def hum(_text: str, _voice: Voice, rng: Random) -> np.ndarray:
    """What is recorded in the place of speech, for which espeak-ng would be needed."""
    return sound(rng.uniform(0.3, SECONDS), rng.randrange(99))


def test_questions_have_answers_and_held_out_voices_and_pairs_are_apart() -> None:
    kinds, words = Counter[str](), set(lexicon())
    for seed in range(600):
        rng = Random(seed)
        saying = make_saying(rng.choice(("number", "digits", "word", "words", "command", "nothing")), rng)
        assert (saying.parts.get("device"), saying.parts.get("room")) not in HELD_OUT
        assert set(saying.text.split()) <= words
        for kind in kinds_of(saying):
            turn = ask(kind, saying, rng)
            assert turn.question and turn.answer.endswith(".")
            kinds[kind] += 1
        voice = make_voice(rng)
        assert voice.name.partition("+")[2] not in HELD_OUT_VARIANTS and voice.speed not in HELD_OUT_SPEEDS
    assert set(kinds) == set(KINDS)
    unheard = [make_saying("command", Random(seed), held_out=True).parts for seed in range(300)]
    assert {(parts.get("device"), parts.get("room")) for parts in unheard} >= HELD_OUT


def test_ids_in_training_are_those_of_the_template(smollm2: Path) -> None:
    template, tokenizer = ChatTemplate(TEMPLATE, {}), Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    encoder = Encoder(tokenizer)
    tokenizer.add_special_tokens([AUDIO_TOKEN])
    for seed in range(60):
        chat = make_chat(seed, 3, hum)
        rows = 0 if chat.samples is None else audio_tokens(len(chat.samples))
        text = template.render(chat.messages, add_generation_prompt=False)
        ids, said = encoder(chat, 1000)
        assert ids == tokenizer.encode(text.replace(AUDIO_TOKEN, AUDIO_TOKEN * rows)).ids
        assert ids.count(AUDIO_TOKEN_ID) == rows
        answers = [message["content"] for message in chat.messages if message["role"] == "assistant"]
        spoken = [token for token, own in zip(ids, said, strict=True) if own]
        assert tokenizer.decode(spoken, skip_special_tokens=False) == "".join(f"{one}<|im_end|>" for one in answers)


@pytest.fixture(scope="module")
def base(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny, random language model with SmolLM2's vocabulary."""
    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(smollm2, folder, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(**json.loads((smollm2 / "config.json").read_text()) | sizes)
    LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random encoder of Whisper-tiny.en's sizes, with positions for 30 seconds."""
    folder = tmp_path_factory.mktemp("whisper")
    torch.manual_seed(1)
    encoder = AutoModel.from_config(AutoConfig.for_model(**ENCODER | {"max_source_positions": 1500}))
    save_file(
        {f"model.encoder.{name}": tensor.detach().half() for name, tensor in encoder.named_parameters()},
        folder / "model.safetensors",
    )
    return folder


def test_the_merged_folder_computes_as_the_trained_model(base: Path, whisper: Path, tmp_path: Path) -> None:
    student = Student(base, whisper, spoken_tokens(base / "tokenizer.json"), None, torch.float32).eval()
    for parameter in student.trained.values():
        parameter.data = (parameter.data + 0.05 * torch.randn_like(parameter)).bfloat16().float()
    save(tmp_path / "trained", student.trained, student.encoder, {})
    merged = tmp_path / "merged"
    merged.mkdir()
    merge(base, tmp_path / "trained", merged, lambda *_: None, whisper)

    clips = [sound(0.7, 1), sound(3.2, 2)]
    lengths = torch.tensor([len(clip) for clip in clips])
    sounds = torch.zeros(2, int(lengths.max()), dtype=torch.int16)
    for row, clip in zip(sounds, clips, strict=True):
        row[: len(clip)] = torch.from_numpy(clip)
    nothing = torch.zeros(0)
    batch = Batch(nothing, nothing, sounds, lengths, nothing, nothing)
    with torch.inference_mode():
        vectors, counts = student.hear(batch)
    encoder = BatchEncoder(EncoderConfig(model=str(merged), dtype="float32", threads=1))
    found = {}
    for some in encoder.encode([MediaInput(flac(clip), kind="audio") for clip in clips]):
        found |= dict(some)
    for row, clip in enumerate(clips):
        served = found[row]
        assert isinstance(served, EncodedMedia), served
        assert served.rows == counts[row] == audio_tokens(len(clip))
        rows = torch.frombuffer(bytearray(readable(served.data)), dtype=torch.float32).view(served.rows, -1)
        torch.testing.assert_close(rows, vectors[row, : served.rows], atol=1e-3, rtol=1e-3)

    model = AudioFlamingo3ForConditionalGeneration.from_pretrained(merged, dtype=torch.float32).eval()
    hidden = torch.randn(1, 6, 64)
    with torch.inference_mode():
        ours = student.language(inputs_embeds=hidden).last_hidden_state
        theirs = model.model.language_model(inputs_embeds=hidden).last_hidden_state
    torch.testing.assert_close(theirs, ours, atol=0.05, rtol=0.05)


def flac(samples: np.ndarray) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, samples, RATE, format="FLAC", subtype="PCM_16")
    return file.getvalue()
