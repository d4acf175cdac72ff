"""The embedding cache against an obvious one, the keys of images, and the cache's metrics over several processes."""

import json
import os
import re
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.media import EncodedMedia
from multimodal.media.cache import EmbeddingCache
from multimodal.media.prompts import media_key
from server.metrics.page import ServerMetrics
from server.metrics.replica import watch_cache
from tests.support.environment import python_path

HIDDEN = 3


def encoded(rows: int = 1, text: str = "", dtype: str = "float32", data: bytes | None = None) -> EncodedMedia:
    size = rows * HIDDEN * (4 if dtype == "float32" else 2)
    return EncodedMedia(text=text, rows=rows, dtype=dtype, data=bytes(size) if data is None else data)  # type: ignore[arg-type]


class Obvious:
    """The same by looking at everything each time."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.entries: OrderedDict[str, EncodedMedia] = OrderedDict()
        self.hits = self.misses = self.evictions = 0

    def size(self, image: EncodedMedia) -> int:
        return image.rows * HIDDEN * (4 if image.dtype == "float32" else 2) + len(image.text.encode())

    def held(self) -> int:
        return sum(map(self.size, self.entries.values()))

    def get(self, key: str) -> EncodedMedia | None:
        if key not in self.entries:
            self.misses += 1
            return None
        self.hits += 1
        self.entries[key] = self.entries.pop(key)
        return self.entries[key]

    def put(self, key: str, image: EncodedMedia) -> bool:
        if self.size(image) > self.capacity:
            return False
        self.entries.pop(key, None)
        while self.held() + self.size(image) > self.capacity:
            del self.entries[next(iter(self.entries))]
            self.evictions += 1
        self.entries[key] = image
        return True


images = st.builds(
    encoded,
    rows=st.integers(0, 6),
    text=st.text(st.sampled_from("aé図"), max_size=8),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
)
steps = st.lists(st.tuples(st.sampled_from("abcdefgh"), st.none() | images), max_size=60)


@given(st.integers(0, 150), steps)
def test_the_cache_equals_a_simple_one(capacity: int, done: list[tuple[str, EncodedMedia | None]]) -> None:
    cache, obvious = EmbeddingCache(capacity, HIDDEN), Obvious(capacity)
    for key, image in done:
        if image is None:
            assert cache.get(key) is obvious.get(key)
        else:
            assert cache.put(key, image) == obvious.put(key, image)
        stats = cache.stats
        assert stats[:5] == (obvious.hits, obvious.misses, obvious.evictions, len(obvious.entries), obvious.held())
        assert 0 <= stats.bytes <= capacity and stats.utilisation == (stats.bytes / capacity if capacity else 0)


def test_media_larger_than_the_cache_evict_nothing() -> None:
    cache = EmbeddingCache(40, HIDDEN)
    assert cache.put("a", encoded(1, "four")) and cache.put("b", encoded(2))
    before = cache.stats
    assert not cache.put("c", encoded(4)) and not cache.put("a", encoded(3, "five!"))
    assert cache.stats == before and cache.get("a") == encoded(1, "four") and before.utilisation == 1.0
    assert cache.put("a", encoded(1)) and (cache.stats.entries, cache.stats.bytes, cache.stats.evictions) == (2, 36, 0)


def test_without_capacity_it_always_misses() -> None:
    cache = EmbeddingCache(0, HIDDEN)
    assert not cache.put("a", encoded()) and cache.get("a") is None
    assert cache.stats == (0, 1, 0, 0, 0, 0.0)


@pytest.mark.parametrize(
    "image", [encoded(2, data=bytes(23)), encoded(2, dtype="float16", data=bytes(24)), encoded(2, data=b"")]
)
def test_only_contiguous_embeddings_are_kept(image: EncodedMedia) -> None:
    cache = EmbeddingCache(1000, HIDDEN)
    with pytest.raises(ValueError, match="2 rows of 3"):
        cache.put("a", image)
    assert cache.stats.entries == 0


def test_a_key_names_the_file_the_encoder_and_the_detail() -> None:
    keys = [
        media_key(data, fingerprint, "image", detail)  # type: ignore[arg-type]
        for data in (b"cat", b"dog", b"")
        for fingerprint in ("f" * 32, "e" * 32)
        for detail in ("auto", "low", "high")
    ]
    assert len(set(keys)) == len(keys) and all(re.fullmatch("[0-9a-f]{64}", key) for key in keys)
    assert keys[0] == media_key(b"cat", "f" * 32)


def page_of(metrics: ServerMetrics) -> dict[str, float]:
    found = re.findall(r'^trtllm_embedding_cache_(\w+){model_name="m"} (\S+)$', metrics.render().decode(), re.MULTILINE)
    return {name: float(value) for name, value in found if not name.endswith("_created")}


def test_metrics() -> None:
    metrics, cache = ServerMetrics("m", None), EmbeddingCache(48, HIDDEN)
    assert page_of(metrics) == {}, "there is no cache"
    watch_cache(metrics.polled, cache)
    zero = {"hits_total": 0, "misses_total": 0, "evictions_total": 0, "bytes": 0, "entries": 0, "utilization": 0}
    assert page_of(metrics) == zero
    for key in "abc":
        cache.put(key, encoded(2))
    assert cache.get("a") is None and cache.get("c") is not None and cache.get("b") is not None
    expected = {"hits_total": 2, "misses_total": 1, "evictions_total": 1, "bytes": 48, "entries": 2, "utilization": 1}
    assert page_of(metrics) == expected
    assert page_of(metrics) == expected, "what was counted is not counted again"


PROCESS = """
import json, sys
from pathlib import Path
from tests.multimodal.media.test_cache import EmbeddingCache, ServerMetrics, encoded, page_of, watch_cache
metrics, cache = ServerMetrics("m", Path(sys.argv[1])), EmbeddingCache(48, 3)
watch_cache(metrics.polled, cache)
for key in sys.argv[2]:
    cache.put(key, encoded(1))
cache.get("a"), cache.get("z")
metrics.render()
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps(page_of(metrics)))
"""


def process(folder: Path, keys: str) -> "subprocess.Popen[str]":
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(folder), "PYTHONPATH": python_path()}
    command = [sys.executable, "-c", PROCESS, str(folder), keys]
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_metrics_add_up_over_processes(tmp_path: Path) -> None:
    with process(tmp_path, "ab") as one, process(tmp_path, "abc") as other:
        assert [each.stdout.readline() for each in (one, other) if each.stdout is not None] == ["ready\n"] * 2
        page = json.loads(one.communicate("\n", timeout=30)[0])
        other.communicate("\n", timeout=30)
    assert page == {
        "hits_total": 2,
        "misses_total": 2,
        "evictions_total": 0,
        "bytes": 60,
        "entries": 5,
        "utilization": 0.75,
    }
