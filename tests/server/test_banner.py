"""What a ready server says of itself."""

import msgspec
import pytest

from engine.admission import AdmissionEngine
from server.process.banner import banner, warning
from server.settings import Settings
from tests.support.servers import application


async def test_the_banner_says_what_runs_where_and_how_to_stop_it() -> None:
    async with application() as (_, state):
        text = banner(Settings(engine="fake", api_keys="a,b"), state["replica"], "http://127.0.0.1:1", 1.25)
        lines = [line.split(maxsplit=1) for line in text.strip().splitlines()]
        found = {words[0]: words[1] for words in lines if len(words) == 2}
        assert text.strip().splitlines()[0] == "Trellis 0.1.0 is ready after 1.2 s"
        assert found["model"] == "fake" and found["API"] == "http://127.0.0.1:1/v1"
        assert found["KV"] == "cache  2,097,152 tokens"
        assert found["limits"] == "context 32,768 tokens, 1024 sequences at once"
        assert found["page"] == "http://127.0.0.1:1/"
        assert found["docs"] == "http://127.0.0.1:1/docs" and found["metrics"] == "http://127.0.0.1:1/metrics"
        assert found["access"] == "2 API keys: requests need one"
        assert found["stop"].startswith("Ctrl-C")
        assert "tiers" not in text
        info = msgspec.structs.replace(state["replica"].engine.info, host_kv_bytes=3 << 30, disk_kv_bytes=5 << 30)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(AdmissionEngine, "info", info)
            text = banner(Settings(engine="fake"), state["replica"], "http://127.0.0.1:1", 1.25)
            assert "KV tiers  3.2 GB on the host, 5.4 GB on the disk" in text
        bare = banner(Settings(engine="fake", docs=False, host="0.0.0.0"), state["replica"], "http://127.0.0.1:1", 1.0)
        assert "/docs" not in bare and "page" not in bare
        assert "anyone who reaches this machine, without an API key" in bare


@pytest.mark.parametrize(
    ("settings", "warns"),
    [
        ({}, False),
        ({"host": "0.0.0.0"}, True),
        ({"host": "::"}, True),
        ({"host": "192.168.0.7"}, True),
        ({"host": "localhost"}, False),
        ({"host": "::1"}, False),
        ({"host": "0.0.0.0", "api_keys": "k"}, False),
    ],
)
def test_an_open_door_is_warned_about(settings: dict[str, str], warns: bool) -> None:
    assert bool(warning(Settings(**settings))) == warns
    assert Settings(**settings).is_local == (settings.get("host", "localhost") in ("localhost", "::1"))
