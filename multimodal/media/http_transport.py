"""How image servers are connected to."""

import httpx


class Transport(httpx.AsyncHTTPTransport):
    """httpx' own, for which a connection that is lost as soon as it was made is an `httpx.ConnectError`, as others are.

    With anyio 4 on uvloop it is an AttributeError: anyio asks for the address of a socket that uvloop has let go of by then.
    """

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        try:
            return await super().handle_async_request(request)
        except AttributeError as error:
            raise httpx.ConnectError("the connection was lost as soon as it was made", request=request) from error
