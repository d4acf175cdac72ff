"""smolvideo's clips and questions: training sees what the server makes of a file, and weights merge as trained."""

import json
import re
import shutil
from collections import Counter
from itertools import islice
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, SmolVLMForConditionalGeneration

from engine.checkpoints.merge import merge
from engine.config import EncoderConfig, VideoOptions
from engine.embedded.vision.batches import BatchEncoder
from engine.kit.video_file import VideoFile, as_smolvlm, sampling_of
from engine.media import ANY_FRAMES, EncodedMedia, FrameSampling, MediaInput
from multimodal.text.templates import ChatTemplate
from smolvideo import architecture
from smolvideo.architecture import FPS, FRAME_TOKENS, FRAMES, IMAGE_TOKEN_ID, TEMPLATE
from smolvideo.chats import batch_of, encode, held_out_chats, make_chat, tokenizer
from smolvideo.clips import Clip, make_clip
from smolvideo.evaluate import video_file
from smolvideo.model import Student
from smolvideo.questions import KINDS, ask
from smolvision.architecture import save as save_smolvision
from smolvision.images import HELD_OUT, PATCH, SIZE
from smolvision.model import Student as SmolvisionStudent


def test_clips_keep_within_the_picture_and_held_out_pairs_apart() -> None:
    kinds = Counter[str]()
    for seed in range(600):
        clip = make_clip(Random(seed))
        assert len({track.shape for track in clip.tracks}) == len({track.colour for track in clip.tracks})
        for track in clip.tracks:
            assert (track.colour, track.shape) not in HELD_OUT and track.colour != clip.background
            for time in np.linspace(0, 1, 15):
                if item := track.item(float(time)):
                    half = item.size / 2
                    assert half <= item.x <= SIZE - half and half <= item.y <= SIZE - half
        kinds.update(kind for kind in KINDS if ask(kind, clip, Random(seed)))
    assert set(kinds) == set(KINDS)
    clips = [make_clip(Random(seed), held_out=True) for seed in range(300)]
    assert {(track.colour, track.shape) for clip in clips for track in clip.tracks} >= HELD_OUT


def test_all_that_happens_can_be_seen_in_the_frames_that_are_taken() -> None:
    """Each bounce as a turn of more than a patch; each appearance and disappearance between two frames of its own."""
    bounces = 0
    for kind in ("bounces", "appears", "disappears"):
        for chat, _ in islice(held_out_chats(kind), 60):
            assert isinstance(chat.subject, Clip)
            times = [index / (chat.total - 1) for index in chat.taken]
            events = [event for track in chat.subject.tracks for event in (track.begin, track.end) if 0 < event <= 1]
            places = [sum(time < event for time in times) for event in events]
            assert len({*places}) == len(places) and all(0 < place < len(times) for place in places)
            for track in chat.subject.tracks:
                seen = [item for time in times if (item := track.item(time))]
                if track.moves:
                    ways = max([item.x for item in seen], [item.y for item in seen], key=np.ptp)
                    assert turns(ways) == track.bounces
                    bounces += track.bounces
                if track.bounces:
                    told = ask("ways", chat.subject, Random(0))
                    assert told and len(re.findall("right|left|up|down", told.answer)) == track.bounces + 1
    assert bounces > 30


def turns(places: list[float]) -> int:
    """How often the direction changes, shifts of less than a patch aside."""
    count = way = 0
    last = places[0]
    for place in places[1:]:
        if abs(place - last) > PATCH:
            now = 1 if place > last else -1
            count += way == -now
            way = now
            last = place
        elif (place - last) * way > 0:
            last = place
    return count


@pytest.fixture(scope="module")
def folder(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """smolvision over a tiny, random language model with SmolLM2's vocabulary."""
    base, made = tmp_path_factory.mktemp("base"), tmp_path_factory.mktemp("smolvision")
    shutil.copytree(smollm2, base, ignore=shutil.ignore_patterns("*.safetensors"), dirs_exist_ok=True)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "head_dim": 16}  # fmt: skip
    torch.manual_seed(0)
    config = LlamaConfig(**json.loads((smollm2 / "config.json").read_text()) | sizes)
    LlamaForCausalLM(config).bfloat16().save_pretrained(base)
    save_smolvision(made / "trained", dict(SmolvisionStudent(base, None, torch.float32).trained), {})
    merge(base, made / "trained", made, lambda *_: None)
    return made


def test_ids_in_training_are_those_of_the_template(folder: Path) -> None:
    template, tokens = ChatTemplate(TEMPLATE, {}), tokenizer(folder)
    for seed in range(60):
        chat = make_chat(seed, 3)
        text = template.render(chat.messages, add_generation_prompt=False)
        placeholder = "<video>" if isinstance(chat.subject, Clip) else "<image>"
        ids, said = encode(tokens, chat)
        assert ids == tokens.encode(text.replace(placeholder, chat.shown())).ids
        assert ids.count(IMAGE_TOKEN_ID) == FRAME_TOKENS * len(chat.pictures(Random(0)))
        answers = [message["content"] for message in chat.messages if message["role"] == "assistant"]
        spoken = [token for token, own in zip(ids, said, strict=True) if own]
        assert tokens.decode(spoken, skip_special_tokens=False) == "".join(f"{answer}<|im_end|>" for answer in answers)


def test_the_merged_folder_computes_as_the_trained_model(folder: Path, tmp_path: Path) -> None:
    student = Student(folder, None, torch.float32)
    taught = {id(parameter) for parameter in student.trained.values()}
    assert all(parameter.requires_grad == (id(parameter) in taught) for parameter in student.parameters())
    for name, parameter in student.trained.items():
        if name.endswith("lora_up"):
            parameter.data.normal_(0, 0.05)
        parameter.data = parameter.data.bfloat16().float()
    architecture.save(tmp_path / "trained", dict(student.trained), {})
    merge(folder, tmp_path / "trained", tmp_path, lambda *_: None)
    chat, _ = next(held_out_chats("mover"))
    batch = batch_of(tokenizer(folder), [chat], Random(0))
    pixels = batch.pictures.permute(0, 3, 1, 2)[None].float() / 127.5 - 1
    model = SmolVLMForConditionalGeneration.from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.inference_mode():
        seen = model.model.get_image_features(pixels).pooler_output[0].view(FRAMES, FRAME_TOKENS, -1)
        torch.testing.assert_close(seen, student.look(batch.pictures), rtol=0.03, atol=0.03)

    served = BatchEncoder(EncoderConfig(model=str(tmp_path), dtype="float32"))
    file = MediaInput(video_file(chat, Random(0)), kind="video")
    ((outcome,),) = (dict(pairs).values() for pairs in served.encode([file]))
    assert isinstance(outcome, EncodedMedia) and outcome.text == chat.shown()
    rows = torch.frombuffer(bytearray(outcome.data), dtype=torch.float32).view(FRAMES, FRAME_TOKENS, -1)
    assert (rows - seen).abs().mean() < 0.2 * seen.abs().mean(), "but for what the codec loses"
    opened = VideoFile(file, VideoOptions())
    own = sampling_of(ANY_FRAMES, VideoOptions(), FrameSampling(FPS, FRAMES))
    assert as_smolvlm(opened.total, opened.fps, own) == chat.taken.tolist()
