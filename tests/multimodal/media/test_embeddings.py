"""Embeddings from clients: only files that safetensors could write are read, and nothing in them is executed."""

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.numpy import save

from multimodal.errors import InvalidMedia, MediaError, UnsupportedMedia
from multimodal.media.embeddings import Embeddings, read_embeddings
from multimodal.media.limits import MediaLimits
from multimodal.media.loader import MediaLoader
from tests.support.media import data_url, ok, world

HIDDEN = 8
VALUES = np.random.default_rng(0).standard_normal((5, HIDDEN)).astype("float32")
GRID = np.array([[1, 2, 10]], dtype="int64")


def raw(header: Any, body: bytes = b"", length: int | None = None) -> bytes:
    """A file by hand; `length` is what it says of its header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def entry(dtype: str = "F32", shape: Any = (1, HIDDEN), offsets: Any = (0, 32)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("shape", [(5, HIDDEN), (1, 5, HIDDEN)])
def test_a_single_tensor_may_have_any_name(dtype: str, shape: tuple[int, ...]) -> None:
    values = VALUES.astype(dtype).reshape(shape)
    found = read_embeddings(save({"whatever": values}, {"format": "np"}), HIDDEN)
    assert (found.rows, found.dtype, found.data, found.grid) == (5, dtype, values.tobytes(), (0, 0, 0))


def test_bfloat16() -> None:
    body = (VALUES.view("uint32") >> 16).astype("uint16").tobytes()
    found = read_embeddings(raw({"x": entry("BF16", [5, HIDDEN], [0, len(body)])}, body), HIDDEN)
    assert (found.dtype, found.data) == ("bfloat16", body)


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_others_are_auxiliary_to_mm_embeddings(dtype: str) -> None:
    file = save(
        {
            "a": VALUES[:1],
            "mm_embeddings": VALUES,
            "image_grid_thw": GRID.astype(dtype),
            "z": np.zeros(3, dtype="uint8"),
        }
    )
    found = read_embeddings(file, HIDDEN)
    assert (found.rows, found.data, found.grid) == (5, VALUES.tobytes(), (1, 2, 10))
    assert {name: tensor.shape for name, tensor in found.auxiliary.items()} == {
        "a": (1, HIDDEN),
        "image_grid_thw": (1, 3),
        "z": (3,),
    }
    assert found.auxiliary["a"].data == VALUES[:1].tobytes()


@pytest.mark.parametrize("grid", [[1, 2], [1, 2, -10], [1, 0, 10], [1, 2, 1 << 40], [[1, 2, 3], [4, 5, 6]]])
def test_grids_that_make_no_sense_are_refused(grid: list[int]) -> None:
    with pytest.raises(InvalidMedia, match="image_grid_thw"):
        _ = read_embeddings(save({"mm_embeddings": VALUES, "image_grid_thw": np.array(grid)}), HIDDEN).grid


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("place", [0, 17, -1])
def test_values_must_be_finite(value: float, dtype: str, place: int) -> None:
    values = np.full((1 << 15, HIDDEN), -6.0e4, dtype=dtype)  # the largest that float16 can say, nearly
    assert read_embeddings(save({"x": values}), HIDDEN).rows == 1 << 15
    values.flat[place] = value
    with pytest.raises(InvalidMedia, match="finite"):
        read_embeddings(save({"x": values}), HIDDEN)


BAD_SHAPES = [(HIDDEN,), (5, HIDDEN + 1), (2, 5, HIDDEN), (1, 1, 5, HIDDEN), (0, HIDDEN), (5, 0), ()]


@pytest.mark.parametrize("shape", BAD_SHAPES)
def test_the_shape_must_be_rows_of_the_hidden_size(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidMedia, match=r"shape \[rows, 8\]"):
        read_embeddings(save({"x": np.zeros(shape, dtype="float32")}), HIDDEN)


@pytest.mark.parametrize("dtype", ["float64", "int8", "uint8", "int64", "bool"])
def test_the_type_must_be_one_of_three(dtype: str) -> None:
    with pytest.raises(InvalidMedia, match="not of type"):
        read_embeddings(save({"x": np.zeros((5, HIDDEN), dtype=dtype)}), HIDDEN)


def test_several_tensors_need_the_name() -> None:
    with pytest.raises(InvalidMedia, match="mm_embeddings"):
        read_embeddings(save({"a": VALUES, "b": VALUES}), HIDDEN)


DATA = bytes(32)
BROKEN = {
    "nothing": b"",
    "a cut length": b"\x01\0\0",
    "a length beyond the file": raw({"x": entry()}, DATA, 1 << 20),
    "a length beyond all": raw({"x": entry()}, DATA, (1 << 64) - 1),
    "no length": raw({"x": entry()}, DATA, 0),
    "a header beyond the limit": raw({"x": entry(), "__metadata__": {"a": "x" * 70000}}, DATA),
    "no JSON": raw(b"{xxxxxxx", DATA),
    "a list": raw([entry()], DATA),
    "a deep one": raw(b'{"x":' + b"[" * 30000 + b"]" * 30000 + b"}", DATA),
    "no UTF-8": raw(b'{"\xff":1}', DATA),
    "no tensor": raw({}, b""),
    "metadata alone": raw({"__metadata__": {"format": "pt"}}, b""),
    "many tensors": raw({str(n): entry("U8", [0], [0, 0]) for n in range(17)}, b""),
    "an unknown field": raw({"x": {**entry(), "code": "import os"}}, DATA),
    "an unknown type": raw({"x": entry("F8_E4M3", [4, HIDDEN])}, DATA),
    "a missing field": raw({"x": {"dtype": "F32", "shape": [1, HIDDEN]}}, DATA),
    "a negative dimension": raw({"x": entry(shape=[-1, -HIDDEN])}, DATA),
    "a dimension beyond all": raw({"x": entry(shape=[1 << 60, HIDDEN])}, DATA),
    "a fraction": raw({"x": entry(shape=[1.5, HIDDEN])}, DATA),
    "a text for a shape": raw({"x": entry(shape="18")}, DATA),
    "many dimensions": raw({"x": entry(shape=[1] * 9 + [HIDDEN])}, DATA),
    "offsets beyond the file": raw({"x": entry(shape=[2, HIDDEN], offsets=[0, 64])}, DATA),
    "offsets before it": raw({"x": entry(offsets=[-32, 0])}, DATA),
    "offsets the other way": raw({"x": entry(offsets=[32, 0])}, DATA),
    "three offsets": raw({"x": entry(offsets=[0, 32, 64])}, DATA),
    "a shape beyond its offsets": raw({"x": entry(shape=[2, HIDDEN])}, DATA),
    "a gap before": raw({"x": entry(offsets=[4, 36])}, bytes(36)),
    "a gap between": raw({"mm_embeddings": entry(), "y": entry(offsets=[36, 68])}, bytes(68)),
    "an overlap": raw({"mm_embeddings": entry(), "y": entry()}, DATA),
    "bytes at the end": raw({"x": entry()}, DATA + b"PK\3\4"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused(name: str) -> None:
    with pytest.raises(InvalidMedia) as caught:
        read_embeddings(BROKEN[name], HIDDEN)
    assert len(str(caught.value)) <= 160


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_accepted_files_are_read_alike_by_safetensors(data: st.DataObject) -> None:
    file = bytearray(save({"mm_embeddings": VALUES, "image_grid_thw": GRID}))
    for _ in range(data.draw(st.integers(1, 3))):
        file[data.draw(st.integers(0, 199))] = data.draw(st.sampled_from(b'0123456789{}[]",:-FIU\0\xff'))
    try:
        found = read_embeddings(bytes(file), HIDDEN)
    except MediaError:
        return
    try:
        tensors = dict(deserialize(bytes(file)))
    except SafetensorError:
        pytest.fail("the library refuses the file")
    assert bytes(tensors["mm_embeddings" if "mm_embeddings" in tensors else next(iter(tensors))]["data"]) == found.data


class Bomb:
    """Leaves a mark when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._mark,)


@pytest.mark.parametrize(
    "name", ["x.pt", "x.PTH", "x.bin", "x.pkl", "x.pickle", "x.ckpt", "x.npy", "x.npz", "x.safetensors", "x.png", "x"]
)
async def test_pickles_are_refused_under_every_name(tmp_path: Path, name: str) -> None:
    mark, file = tmp_path / "mark", pickle.dumps(Bomb(tmp_path / "mark"))
    (tmp_path / name).write_bytes(file)
    loader = MediaLoader(MediaLimits(local_folder=tmp_path), HIDDEN)
    urls = [name, f"file://{tmp_path}/{name}", f"file://{tmp_path}/{name}?a=b"]
    for url in urls:
        with pytest.raises(MediaError):
            await loader.load(url)
    async with world(HIDDEN) as w:
        w.server.answers |= {f"/{name}": ok(file), f"/{name}?sig=x.png": ok(file)}
        for path in w.server.answers:
            with pytest.raises(MediaError):
                await w.loader.load("http://images.test" + path)
    for media_type in ("image/png", "application/octet-stream"):
        with pytest.raises(MediaError):
            await loader.load(data_url(file, media_type))
    await loader.aclose()
    assert not mark.exists()
    pickle.loads(file)  # noqa: S301 - the bomb is one
    assert mark.exists()


async def test_embeddings_are_loaded_from_files_and_servers(tmp_path: Path) -> None:
    file = save({"x": VALUES})
    (tmp_path / "e.safetensors").write_bytes(file)
    async with world(HIDDEN, local_folder=tmp_path) as w:
        w.server.answers |= {"/e.safetensors": ok(file), "/e.SafeTensors?sig=1&x=y.png": ok(file), "/e.png": ok(file)}
        for url in ("e.safetensors", f"file://{tmp_path}/e.safetensors", "http://images.test/e.safetensors"):
            loaded = await w.loader.load(url)
            assert isinstance(loaded, Embeddings)
            assert (loaded.file, loaded.data) == (file, VALUES.tobytes())
        assert isinstance(await w.loader.load("http://images.test/e.SafeTensors?sig=1&x=y.png"), Embeddings)
        with pytest.raises(UnsupportedMedia):
            await w.loader.load("http://images.test/e.png")
        with pytest.raises(UnsupportedMedia):
            await w.loader.load(data_url(file, "application/octet-stream"))


async def test_embeddings_are_refused_where_the_model_takes_none() -> None:
    async with world() as w:
        with pytest.raises(UnsupportedMedia, match="no embeddings"):
            await w.loader.load("http://images.test/e.safetensors")
        assert w.asked == []
