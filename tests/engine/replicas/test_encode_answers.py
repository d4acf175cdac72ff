"""The codec of the answers of /encode.

Covers versions, fields that later versions may add, and answers that contradict themselves.
"""

from typing import Any

import msgspec
import pytest

from engine.errors import InvalidRequest
from engine.kit import handoff
from engine.media import EncodedMedia, Encoding, MediaInput
from engine.replicas.encode_answers import EncodeAnswer, check_answer, decode_answer

MEDIA = EncodedMedia(text="xx", rows=2, dtype="float16", data=bytes(12))
ANSWER = EncodeAnswer(version=handoff.VERSION, media=(MEDIA,), sizes=(12,))
ENCODING = Encoding(version=handoff.VERSION, backend="trtllm", prompt="<image>", state=b"state")


def test_an_answer_arrives_as_it_was_sent_whatever_fields_a_later_version_adds() -> None:
    for answer in (ANSWER, EncodeAnswer(version=handoff.VERSION, encoding=ENCODING)):
        fields = msgspec.msgpack.decode(handoff.encode(answer))
        assert decode_answer(msgspec.msgpack.encode({**fields, "later": 1})) == answer


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ({"version": handoff.VERSION + 1}, "embeddings has version"),
        ({"encoding": msgspec.structs.replace(ENCODING, version=handoff.VERSION + 1)}, "encoding has version"),
        ({"sizes": ()}, "not as many"),
        ({"sizes": (11,)}, "not as long"),
        ({"media": (msgspec.structs.replace(MEDIA, rows=-1),)}, "not as long"),
        ({"media": ({"text": "", "rows": 1, "dtype": "int8"},)}, "cannot be read"),
    ],
)
def test_inconsistent_answers_are_refused(wrong: dict[str, Any], complaint: str) -> None:
    with pytest.raises(InvalidRequest, match=complaint):
        decode_answer(handoff.encode(msgspec.structs.replace(ANSWER, **wrong)))


def test_an_answer_has_what_was_asked_for() -> None:
    whole = EncodeAnswer(version=handoff.VERSION, encoding=ENCODING)
    check_answer(ANSWER, 1, 3)
    check_answer(whole, 0, 0)
    for answer, count, hidden_size in ((ANSWER, 1, 4), (ANSWER, 2, 3), (ANSWER, 0, 3), (whole, 1, 3)):
        with pytest.raises(InvalidRequest):
            check_answer(answer, count, hidden_size)


def test_media_of_a_kind_that_is_not_known_are_refused() -> None:
    decoder = msgspec.msgpack.Decoder(MediaInput)
    assert decoder.decode(msgspec.msgpack.encode({"data": b"x", "later": 1})) == MediaInput(b"x", kind="image")
    with pytest.raises(msgspec.ValidationError):
        decoder.decode(msgspec.msgpack.encode({"data": b"x", "kind": "smell"}))
