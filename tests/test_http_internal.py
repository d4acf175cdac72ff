"""Internal routes belong to replicas: the internal secret opens them, and API keys do not."""

from http_support import application


async def test_internal_routes_take_the_internal_secret_alone() -> None:
    async with application(api_keys="key", internal_secret="secret") as (client, _):
        for path in ("/prefill", "/encode"):
            for headers in ({}, {"Authorization": "Bearer key"}, {"Authorization": "secret"}, {"Authorization": "Bearer secre"}):
                refused = await client.post(path, headers=headers)
                assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
            assert (await client.post(path, headers={"Authorization": "Bearer secret"})).status_code == 404
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer secret"})).status_code == 401
        assert (await client.get("/v1/models", headers={"Authorization": "Bearer key"})).status_code == 200


async def test_without_a_secret_nobody_uses_them_and_without_keys_the_rest_is_open() -> None:
    async with application() as (client, _):
        assert (await client.post("/prefill", headers={"Authorization": "Bearer "})).status_code == 401
        assert (await client.get("/v1/models")).status_code == 200
