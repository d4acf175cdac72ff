"""The documents against the code: paths, settings, routes, refused fields, roles, links and the order of the log."""

import ast
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.routing import APIRoute, iter_route_contexts

from server.app import create_app
from server.settings import Settings
from tests.support.servers import CHAT, application

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
ARCHITECTURE = ROOT / "docs/architecture.md"
LOG = ROOT / "docs/log.md"
GUIDES = [README, ROOT / "CONTRIBUTING.md", *(path for path in sorted(ROOT.glob("docs/**/*.md")) if path != LOG)]
LINKED = [
    *GUIDES,
    LOG,
    ROOT / "CHANGELOG.md",
    *(
        path
        for folder in ("benchmarks", "deploy", "smolaudio", "smoldraw", "smoleagle", "smolvideo", "smolvision")
        for path in sorted(ROOT.glob(f"{folder}/**/*.md"))
    ),
]
FOREIGN_VARIABLES = {
    "FIRST_PORT",
    "ROUTER_PORT",
    "SLURM_JOB_NODELIST",
    "SLURM_TASKS_PER_NODE",
    "TLLM_PROFILE_START_STOP",
    "TLLM_TORCH_PROFILE_TRACE",
    "HF_HUB_OFFLINE",
    "CUDA_VISIBLE_DEVICES",
    "DYN_HEALTH_CHECK_ENABLED",
    "DYN_SYSTEM_PORT",
    "NATS_SERVER",
    "HF_HOME",
    "HF_TOKEN",
    "METRICS_API_KEY",  # Prometheus' container
    "OTEL_EXPORTER_OTLP_CERTIFICATE",
    "OTEL_EXPORTER_OTLP_HEADERS",
    "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL",  # TensorRT-LLM's tracer
    "TLLM_LOG_LEVEL",
    "STORM_SEEDS",  # the tests'
    "TORCH_INDEX",  # the Makefile's
    "UCX_CUDA_IPC_CACHE",
    "UCX_TLS",
}
NO_VARIABLES = {"CPU_PINNED", "NIXL_ERR_REMOTE_DISCONNECT"}
REFUSED_FIELDS: dict[str, tuple[str, Any]] = {
    "best_of": ("completions", 2),
    "use_beam_search": ("chat", True),
    "echo": ("chat", True),
    "suffix": ("completions", "end"),
}
"""A value, for chats or completions, with which each field that the README calls refused would change the answer."""


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def prose_of(path: Path) -> str:
    """Return the text without fenced code."""
    return re.sub(r"^```.*?^```$", "", text_of(path), flags=re.MULTILINE | re.DOTALL)


def section(text: str, title: str) -> str:
    return text.split(f"\n## {title}\n")[1].split("\n## ", maxsplit=1)[0]


def named_paths(text: str) -> Iterator[str]:
    """Yield what stands in backticks and looks like a path of this repository; `file.py: Name` names the file."""
    for code in re.findall(r"`([^`\n]+)`", text):
        path = code.split(":")[0]
        if re.fullmatch(r"[\w.*][\w.*/-]*/[\w.*-]*", path) and path.endswith(
            (".py", ".md", "/", ".json", ".yaml", ".cpp")
        ):
            yield path


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_named_paths_exist(guide: Path) -> None:
    assert [path for path in named_paths(prose_of(guide)) if not any(ROOT.glob(path.rstrip("/")))] == []


def test_modules_named_without_a_folder_exist() -> None:
    foreign = {"async_llm.py"}
    folders = [path for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")]
    ours = {path.name for folder in folders for path in folder.rglob("*.py")} | {"trellis.py"}
    named = {
        (guide.name, code)
        for guide in GUIDES
        for code in re.findall(r"`([\w-]+\.py)`", prose_of(guide))
        if code not in foreign
    }
    assert len(named) > 50
    assert [(guide, code) for guide, code in sorted(named) if code not in ours] == []


def test_paths_are_recognised() -> None:
    text = (
        "`engine/base.py`, `docs/`, `tests/engine/test_conformance*.py`, `engine/media.py: MediaRef`, `/v1/*`, "
        "`a b/c.py`"
    )
    assert list(named_paths(text)) == [
        "engine/base.py",
        "docs/",
        "tests/engine/test_conformance*.py",
        "engine/media.py",
    ]


def test_named_settings_exist() -> None:
    settings = set(Settings.model_fields)
    for field in Settings.model_fields.values():
        settings.update(map(str, getattr(field.validation_alias, "choices", ())))
    named = {
        (guide.name, variable)
        for guide in GUIDES
        for code in re.findall(r"`[^`]+`", prose_of(guide))
        for variable in re.findall(r"(?<![\w./])[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+\b", code)
    }
    assert len(named) > 50
    assert (
        sorted(
            (guide, variable)
            for guide, variable in named
            if variable.lower() not in settings and variable not in FOREIGN_VARIABLES | NO_VARIABLES
        )
        == []
    )


def test_foreign_variables_are_named_somewhere() -> None:
    texts = "".join(map(text_of, GUIDES))
    assert {name for name in FOREIGN_VARIABLES | NO_VARIABLES if name not in texts} == set()


def plain(path: str) -> str:
    """Return a path template without the names of its parameters."""
    return re.sub(r"\{[^}]*\}", "{}", path)


def routes_of(app: FastAPI) -> set[tuple[str, str]]:
    return {
        (method, plain(str(context.path)))
        for context in iter_route_contexts(app.routes)
        for method in getattr(context, "methods", None) or ()
        if method != "HEAD"
    }


def listed_routes() -> set[tuple[str, str]]:
    """Return the routes in the README's table: the first column, and "also at" or "also under" in the second.

    What is below a route may be left to the page that the row names.
    """
    found = set()
    for line in section(text_of(README), "Endpoints").splitlines():
        if not line.startswith("| `"):
            continue
        names, description = line.strip("| ").split(" | ")
        routes = {(method, plain(path)) for method, path in re.findall(r"`([A-Z]+) (/[^`]*)`", names)}
        assert routes, line
        found |= routes
        method, first = next(iter(routes))
        if names.endswith(", and what is below"):
            (page,) = re.findall(r"\]\((docs/[^)]*)\)", description)
            below = re.findall(rf"`([A-Z]+) ({first}/[^`?]*)[^`]*`", text_of(ROOT / page))
            found |= {(method, plain(path)) for method, path in below}
        found |= {(method, plain(path)) for path in re.findall(r"also at `(/[^`]*)`", description)}
        found |= {
            (method, prefix + path)
            for prefix in re.findall(r"also under `(/[^`]*)`", description)
            for _, path in routes
        }
    return found


def test_the_readme_lists_the_routes() -> None:
    assert listed_routes() == routes_of(create_app(Settings(engine="fake")))


def refusals() -> str:
    """Return the README's sentence on fields that are refused, of which it names some."""
    limits = " ".join(section(text_of(README), "Limits").split())
    return limits.split("Fields that would change the answer's meaning")[1].split("Unknown fields")[0]


async def test_fields_that_the_readme_calls_refused_are_refused() -> None:
    sentence = refusals()
    names = set(re.findall(r"`(\w+)`", sentence))
    assert names == set(REFUSED_FIELDS), "give each refused field of the README a value in REFUSED_FIELDS"
    bodies = {"chat": ("/v1/chat/completions", CHAT), "completions": ("/v1/completions", {"prompt": "hello"})}
    async with application() as (client, _):
        for name, (api, value) in REFUSED_FIELDS.items():
            path, body = bodies[api]
            assert (await client.post(path, json=body)).status_code == 200
            answer = await client.post(path, json={**body, name: value})
            assert answer.status_code == 400, name
            error = answer.json()["error"]
            assert (error["code"], error["param"]) == ("unsupported_parameter", name)


@pytest.mark.parametrize("document", LINKED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_resolve(document: Path) -> None:
    targets = re.findall(r"\]\(([^)\s]+)\)", prose_of(document))
    relative = [target.split("#")[0] for target in targets if not re.match(r"\w+:|#", target)]
    assert [target for target in relative if not (document.parent / target).exists()] == []


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) < 120


def test_each_change_has_a_test_that_finds_mistakes() -> None:
    changes = text_of(ROOT / "docs/where-does-it-go.md").partition("## Where do I find")[0]
    rows = [line for line in changes.splitlines() if line.startswith("| ") and not line.startswith("| change |")]
    assert len(rows) > 40
    assert [row for row in rows if "`tests/" not in row.rsplit(" | ", 1)[-1]] == []


def test_the_glossary_defines_each_word_once() -> None:
    words = re.findall(r"^\| \*\*([^*]+)\*\* \|", text_of(ROOT / "docs/glossary.md"), re.MULTILINE)
    assert len(words) > 60
    assert len(words) == len(set(words))


def test_the_log_is_newest_first_and_begins_with_conclusions() -> None:
    entries = re.split(r"^## ", text_of(LOG), flags=re.MULTILINE)[1:]
    dates = [time.strptime(entry[:10], "%Y-%m-%d") for entry in entries]
    assert len(dates) > 5
    assert dates == sorted(dates, reverse=True)
    without = [entry.splitlines()[0] for entry in entries if not entry.split("\n", 1)[1].lstrip().startswith("**")]
    assert without == []


def test_the_list_of_decisions_has_their_titles() -> None:
    folder = ROOT / "docs/decisions"
    listed = re.findall(r"^\| \[(\d+)\]\(([^)]+)\) \| ([^|]+) \|", text_of(folder / "README.md"), re.MULTILINE)
    titles = {path.name: text_of(path).splitlines()[0] for path in folder.glob("0*.md")}
    assert {name: f"# {number}. {title}" for number, name, title in listed} == titles


def test_the_architecture_lists_the_roles_and_their_routes() -> None:
    from server.roles import ROLES  # noqa: PLC0415 - not merged yet

    rows = re.findall(r"^\| `(\w+)`[^|]*\|([^|]*)\|([^|]*)\|[^|]*\|$", text_of(ARCHITECTURE), re.MULTILINE)
    assert [name for name, _, _ in rows] == list(ROLES)
    for name, public, internal in rows:
        posted = {
            route.path
            for router in ROLES[name].routers()
            for route in router.routes
            if isinstance(route, APIRoute) and "POST" in route.methods
        }
        is_public = ROLES[name].entrance == "/v1"
        assert ("`/v1/*`" in public) == is_public, name
        hidden = set() if is_public else {path for path in posted if not path.startswith("/v1")}
        assert set(re.findall(r"`POST (/\w+)`", internal)) == hidden, name


def imports_of(path: Path) -> Iterator[str]:
    """Yield the modules of this repository that a file imports, as paths without suffix."""
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            module = name.replace(".", "/")
            while module and not (ROOT / f"{module}.py").is_file() and not (ROOT / module).is_dir():
                module = module.rpartition("/")[0]
            if module:
                yield module


def owner(module: str, nodes: set[str]) -> str | None:
    """Return the node of the diagram that a module belongs to; None if it has none."""
    return next((node for node in sorted(nodes, key=len, reverse=True) if f"{module}/".startswith(f"{node}/")), None)


def test_the_diagram_of_packages_shows_imports() -> None:
    """Every arrow is an import, and every import between packages of the diagram is an arrow or follows from arrows."""
    diagram = text_of(ARCHITECTURE).split("```mermaid\n")[1].split("```")[0]
    labels = {key: label.removesuffix(".py") for key, label in re.findall(r'(\w+)\["([^"]+)"\]', diagram)}
    arrows = {
        (labels[start], labels[end]) for start, end in re.findall(r"^ *(\w+)\S* --> (\w+)", diagram, re.MULTILINE)
    }
    nodes = set(labels.values())
    assert len(nodes) <= 25
    imports = {
        (start, end)
        for package in ("server", "routers", "multimodal", "engine", "protocol")
        for path in (ROOT / package).rglob("*.py")
        if (start := owner(path.relative_to(ROOT).as_posix().removesuffix(".py"), nodes))
        for module in imports_of(path)
        if (end := owner(module, nodes)) and end != start
    }
    assert arrows - imports == set(), "arrows that are no imports"
    implied = set(arrows)
    while more := {(a, d) for a, b in implied for c, d in implied if b == c} - implied:
        implied |= more
    assert imports - implied == set(), "imports that the diagram does not show"


async def test_the_way_of_a_request_names_every_file_that_a_streamed_chat_crosses() -> None:
    crossed: set[str] = set()
    parts = tuple(f"{ROOT}/{package}/" for package in ("server", "routers", "multimodal", "engine"))
    watching = tuple(f"{ROOT}/{folder}/" for folder in ("server/metrics", "server/health", "routers/batches"))

    def note(frame: FrameType | None, event: str, _: object) -> None:
        file = frame.f_code.co_filename if frame is not None and event == "call" else ""
        if not file.startswith(parts):
            return
        while frame is not None:
            if frame.f_code.co_filename.startswith(watching):
                return
            frame = frame.f_back
        crossed.add(file.removeprefix(f"{ROOT}/"))

    async with application() as (client, _):
        await client.post("/v1/chat/completions", json={**CHAT, "stream": True})  # the first one fills caches
        sys.setprofile(note)
        try:
            answer = await client.post("/v1/chat/completions", json={**CHAT, "stream": True})
        finally:
            sys.setprofile(None)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert len(crossed) > 15, "calls are seen"
    way = ARCHITECTURE.read_text(encoding="utf-8").partition("\n## A request\n")[2].partition("\n## ")[0]
    assert {file for file in crossed if f"`{file}`" not in way} == set()
