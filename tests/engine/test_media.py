"""Which images a block has, against looking at each token."""

from hypothesis import given
from hypothesis import strategies as st

from engine.media import MediaSpan, mm_keys_of, overlaps_of


@st.composite
def prompts(draw: st.DrawFn) -> tuple[MediaSpan, ...]:
    images: list[MediaSpan] = []
    end = 0
    for key in draw(st.lists(st.sampled_from("abc"), max_size=4)):
        start = end + draw(st.integers(0, 9))
        length = draw(st.integers(1, 12))
        images.append(MediaSpan(key=key * 64, start=start, length=length, rows=1, dtype="float32", data=b"data"))
        end = start + length
    return tuple(images)


@given(prompts(), st.integers(0, 60), st.integers(1, 10))
def test_overlaps(images: tuple[MediaSpan, ...], start: int, size: int) -> None:
    expected = []
    for image in images:
        shared = [token for token in range(start, start + size) if image.start <= token < image.start + image.length]
        if shared:
            expected.append((image.key, shared[0] - image.start, shared[0] - start))
    assert list(overlaps_of(images, start, size)) == expected
    assert [(key["hash"], key["start_offset"]) for key in mm_keys_of(overlaps_of(images, start, size))] == [
        entry[:2] for entry in expected
    ]
