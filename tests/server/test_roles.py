"""The records of roles: what they serve, what they need, and that the documentation says the same."""

import re
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from server.roles import ROLES, Role, missing_setting
from server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
SECRET = {"internal_secret": "s"}
COMPLETE: dict[str, dict[str, object]] = {
    "aggregated": {},
    "prefill": SECRET,
    "decode": {**SECRET, "prefill_urls": "http://prefill:8000"},
    "encode": SECRET,
    "router": {"route_urls": "http://replica:8000"},
}


def posted(role: Role) -> set[str]:
    """Paths that a replica of this role takes work at."""
    return {
        route.path
        for router in role.routers()
        for route in router.routes
        if isinstance(route, APIRoute) and "POST" in route.methods
    }


@pytest.mark.parametrize("role", ROLES.values(), ids=lambda role: role.name)
def test_a_role_serves_its_entrance(role: Role) -> None:
    assert any(path.startswith(role.entrance) for path in posted(role))
    assert role.has_engine or not role.moves_kv_blocks


@pytest.mark.parametrize("name", ROLES)
def test_a_role_starts_with_what_it_needs_and_not_without(name: str) -> None:
    given = COMPLETE[name]
    assert missing_setting(Settings(disaggregation_mode=name, **given)) is None
    for missing in given:
        rest = {key: value for key, value in given.items() if key != missing}
        found = missing_setting(Settings(disaggregation_mode=name, **rest))
        assert found is not None and missing.upper() in found[0] and f"the role {name} needs it" in found[1]


@pytest.mark.parametrize("name", ["aggregated", "prefill", "decode", "encode"])
def test_in_a_dynamo_graph_replicas_need_no_addresses(name: str) -> None:
    assert missing_setting(Settings(disaggregation_mode=name, dynamo=True)) is None


@pytest.mark.parametrize(
    ("given", "setting"),
    [
        ({"disaggregation_mode": "router", "route_urls": "http://replica:8000"}, "DISAGGREGATION_MODE"),
        ({"disaggregation_mode": "decode", "prefill_urls": "http://prefill:8000"}, "PREFILL_URLS"),
        ({"api_processes": 2}, "API_PROCESSES"),
    ],
)
def test_a_dynamo_graph_has_its_own_rules(given: dict[str, object], setting: str) -> None:
    found = missing_setting(Settings(**{**given, "dynamo": True}))
    assert found is not None and setting in found[0] and "Dynamo" in found[1]


def test_the_documentation_lists_the_roles_and_their_routes() -> None:
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)`[^|]*\|([^|]*)\|([^|]*)\|[^|]*\|$", text, re.MULTILINE)
    assert [name for name, _, _ in rows] == list(ROLES)
    for name, public, internal in rows:
        role = ROLES[name]
        assert ("`/v1/*`" in public) == (role.entrance == "/v1")
        assert set(re.findall(r"/\w+", internal)) == (
            set() if role.entrance == "/v1" else posted(role) - {"/v1/{path:path}"}
        )
