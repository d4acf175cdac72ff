"""A router's WebSockets before replicas on servers in threads, and before scripted ones that fail."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.http11 import Request, Response
from websockets.sync.client import ClientConnection
from websockets.sync.server import ServerConnection, serve

from engine.replicas import client as clients
from engine.replicas.routing import replica as replicas
from routers.proxy.http import target_of
from routers.responses import websocket as sessions
from routers.state import RouterService
from tests.routers.test_responses_websocket import LONG, PATH, ask, opened, wait_for
from tests.support.servers import ServerThread
from tests.support.waiting import slowness

CREATED = '{"type":"response.created","sequence_number":0,"response":{"id":"resp_0"}}'


KEY = {"authorization": "Bearer one"}


@pytest.fixture(scope="module", autouse=True)
def _patience() -> Iterator[None]:
    """On a busy machine, replicas may take their time to answer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "SILENCE_SECONDS", 60.0)
        patch.setattr(clients, "_HANDSHAKE_SECONDS", 60.0)
        yield


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerThread]:
    """A replica with a token every 5 ms, and a key."""
    folder = tmp_path_factory.mktemp("cache")
    with ServerThread(fake_token_delay_ms=5, cache_dir=folder, responses_store_mb=64, api_keys="one") as found:
        yield found


@pytest.fixture(scope="module")
def router(server: ServerThread) -> Iterator[ServerThread]:
    """A router before that replica."""
    with router_before(server.url, api_keys="one") as found:
        yield found


class Scripted:
    """A replica that is ready, and does with each WebSocket what `script` does."""

    def __init__(self, script: Callable[[ServerConnection], None], refusal: Any = None) -> None:
        """With a `refusal`, a status and a text, it accepts no WebSockets."""
        self.connections: list[ServerConnection] = []
        self.asked = 0
        self._script = script
        self._refusal = refusal
        self._server = serve(self._connected, "127.0.0.1", 0, compression=None, process_request=self._answer)
        self.url = f"http://127.0.0.1:{self._server.socket.getsockname()[1]}"

    def _connected(self, connection: ServerConnection) -> None:
        self.connections.append(connection)
        self._script(connection)

    def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
        probed = request.path == "/health/ready"
        self.asked += not probed
        return connection.respond(200, "") if probed else self._refusal and connection.respond(*self._refusal)

    def __enter__(self) -> "Scripted":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()


@contextmanager
def router_before(*urls: str, **settings: Any) -> Iterator[ServerThread]:
    """A router that takes turns among replicas, all ready. It leaves no work behind."""
    given = {"route_events_port": 0, "route_policy": "round_robin"} | settings
    with ServerThread(disaggregation_mode="router", route_urls=urls, **given) as router:
        service = router.replica.service
        assert isinstance(service, RouterService)
        fleet = list(service.fleet.replicas)
        wait_for(lambda: all(one.available for one in fleet))
        yield router
        wait_for(lambda: not router.replica.running)
        assert {(one.load.requests, one.load.tokens) for one in fleet} == {(0, 0)}


def event(client: ClientConnection) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(client.recv(timeout=20 * slowness()))
    return found


def last(client: ClientConnection) -> dict[str, Any]:
    """The last event of the next response to end."""
    while (found := event(client))["type"] not in ("response.completed", "response.incomplete", "error"):
        pass
    return found


def answer(client: ClientConnection, **fields: Any) -> dict[str, Any]:
    ask(client, **fields)
    found: dict[str, Any] = last(client)["response"]
    return found


def error(client: ClientConnection, **fields: Any) -> dict[str, Any]:
    ask(client, **fields)
    return event(client)


def end_of(client: ClientConnection) -> tuple[int, str]:
    """Code and reason of the close that comes next."""
    with pytest.raises(ConnectionClosed) as closed:
        client.recv(timeout=20 * slowness())
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def hang_up(connection: ServerConnection) -> None:
    """Read a message, and end the connection without a word."""
    connection.recv()
    connection.socket.close()


@pytest.mark.slow
def test_a_connection_is_passed_on(server: ServerThread, router: ServerThread) -> None:
    with opened(router, origin=router.url, additional_headers=KEY) as client:
        first = answer(client, store=False)
        second = answer(client, previous_response_id=first["id"])
        assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"]
        assert httpx.get(f"{router.url}{PATH}/{second['id']}", headers=KEY).json() == second
        assert error(client, temperature=-1)["error"]["param"] == "temperature"
        client.send(b"binary")
        assert event(client)["error"]["message"] == "Messages must be JSON in text frames."
        ask(client, stream_id="long", **LONG)
        ask(client, stream_id="short")
        assert last(client)["stream_id"] == "short"
        for _ in range(sessions.MAX_TURNS):
            ask(client, stream_id="more", **LONG)
        found = last(client)
        assert (found["error"]["code"], found["stream_id"]) == ("websocket_stream_limit_reached", "more")
        assert router.replica.running == sessions.MAX_TURNS
        page = httpx.get(f"{router.url}/metrics", headers=KEY).text
        for status, count in (("2xx", 3.0), ("4xx", 3.0)):
            labels = f'handler="/v1/responses",method="WEBSOCKET",status="{status}"'
            assert f"http_requests_total{{{labels}}} {count}" in page
        client.close()
        wait_for(lambda: not server.replica.running)


def test_a_fragment_is_no_fault_of_the_router() -> None:
    scope = {"path": PATH, "query_string": b"a=%ff#x"}
    assert target_of(scope) == f"{PATH}?a=%ff%23x".encode()


def test_keys_are_checked_at_the_handshake(router: ServerThread) -> None:
    with pytest.raises(InvalidStatus) as refused:
        opened(router)
    assert refused.value.response.status_code == 401


def test_closing_codes_pass_both_ways() -> None:
    def script(connection: ServerConnection) -> None:
        connection.recv()
        connection.send(CREATED)
        if connection.recv() == "close":
            connection.close(4321, "enough")
        else:
            with pytest.raises(ConnectionClosed):
                connection.recv()

    with Scripted(script) as replica, router_before(replica.url) as router:
        for said in ("close", "stay"):
            with opened(router) as client:
                client.send("{}")
                assert client.recv() == CREATED
                client.send(said)
                if said == "close":
                    for _ in range(2):  # messages without an answer
                        assert event(client)["error"]["code"] == "engine_died"
                    assert end_of(client) == (4321, "enough")
                else:
                    client.close(4000, "done")
        wait_for(lambda: replica.connections[1].close_code is not None)
        assert (replica.connections[1].close_code, replica.connections[1].close_reason) == (4000, "done")


@pytest.mark.parametrize("fault", ["hangs up", "refuses"])
def test_another_replica_is_asked_before_the_first_event(server: ServerThread, fault: str) -> None:
    refusal = (503, '{"error": {"code": "not_ready"}}') if fault == "refuses" else None
    with Scripted(hang_up, refusal) as broken, router_before(broken.url, server.url, api_keys="one") as router:
        while not broken.asked:
            with opened(router, additional_headers=KEY) as client:
                assert answer(client)["status"] == "incomplete"
        page = httpx.get(f"{router.url}/metrics", headers=KEY).text
        outcome = "refused" if refusal else "unreachable"
        for found in (f'outcome="{outcome}",replica="0"', 'outcome="ok",replica="1"'):
            assert found in page


def test_a_refusal_concerns_the_message_that_was_refused() -> None:
    """Another one that came meanwhile is tried by itself."""

    class Choosy(Scripted):
        def _answer(self, connection: ServerConnection, request: Request) -> Response | None:
            answer = super()._answer(connection, request)
            if answer is None and self.asked == 1:
                wait_for(lambda: router.replica.running == 2)
                return connection.respond(404, '{"error": {"code": "previous_response_not_found"}}')
            return answer

    def script(connection: ServerConnection) -> None:
        assert json.loads(connection.recv())["stream_id"] == "second"
        connection.send('{"type":"response.completed","response":{"id":"resp_1"},"stream_id":"second"}')
        with pytest.raises(ConnectionClosed):
            connection.recv()

    with Choosy(script) as replica, router_before(replica.url) as router, opened(router) as client:
        ask(client, stream_id="first", previous_response_id="resp_0")
        ask(client, stream_id="second")
        refused = event(client)
        assert (refused["stream_id"], refused["error"]["code"]) == ("first", "previous_response_not_found")
        assert event(client)["type"] == "response.completed"


@pytest.mark.slow
def test_a_stored_response_is_found_at_its_replica(server: ServerThread) -> None:
    with ServerThread(api_keys="one") as other, router_before(other.url, server.url, api_keys="one") as router:
        body = {"input": "hi", "max_output_tokens": 4}
        made = httpx.post(f"{server.url}{PATH}", json=body, headers=KEY).json()
        for _ in range(2):
            with opened(router, additional_headers=KEY) as client:
                assert answer(client, previous_response_id=made["id"])["previous_response_id"] == made["id"]
        with opened(router, additional_headers=KEY) as client:
            assert error(client, previous_response_id="resp_none")["error"]["code"] == "previous_response_not_found"
            assert answer(client)["status"] == "incomplete"


@pytest.mark.parametrize(("draining", "code"), [(False, 1014), (True, 1012)])
def test_a_replica_that_is_lost_ends_the_connection(*, draining: bool, code: int) -> None:
    """A router that stops ends its connections to replicas, too."""
    seen = threading.Event()

    def script(connection: ServerConnection) -> None:
        connection.recv()
        connection.send(CREATED)
        seen.wait()
        connection.socket.close()

    with Scripted(script) as replica, router_before(replica.url) as router, opened(router) as client:
        ask(client, stream_id="main")
        assert client.recv() == CREATED
        router.replica.draining = draining
        seen.set()
        lost = event(client)
        assert (lost["error"]["code"], lost["stream_id"]) == ("engine_died", "main")
        assert end_of(client)[0] == code


def test_no_replica_answers() -> None:
    """Each request gets an error, and the connection stays open."""
    refusal = (401, '{"error": {"message": "Who?", "type": "authentication_error", "param": null, "code": null}}')
    for refused, status in ((None, 503), (refusal, 401)):
        with Scripted(hang_up, refused) as replica, router_before(replica.url) as router, opened(router) as client:
            assert error(client)["status"] == status
            if status == 401:
                assert error(client, stream_id="main")["error"]["message"] == "Who?"
                assert not replica.connections


@pytest.mark.slow
def test_a_router_that_drains_waits_and_closes(server: ServerThread) -> None:
    with (
        router_before(server.url, api_keys="one") as router,
        opened(router, additional_headers=KEY) as client,
        opened(router, additional_headers=KEY) as idle,
    ):
        ask(client, max_output_tokens=50, ignore_eos=True)
        event(client)
        router.replica.draining = True
        found = error(idle)
        assert (found["status"], found["error"]["code"]) == (503, "not_ready")
        assert router.replica.running == 1
        assert last(client)["type"] == "response.incomplete"
        stopping = threading.Thread(target=router.__exit__)
        stopping.start()
        assert {end_of(each)[0] for each in (client, idle)} == {1012}
        stopping.join()
        wait_for(lambda: not server.replica.running)
