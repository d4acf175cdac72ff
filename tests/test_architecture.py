"""Import directions and the homes of foreign libraries, read from the syntax of the product."""

import ast
import functools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "server": {"server", "routers", "multimodal", "engine", "protocol"},
    "routers": {"routers", "multimodal", "engine", "protocol"},
    "multimodal": {"multimodal", "engine", "protocol"},
    "engine": {"engine", "protocol"},
    "protocol": {"protocol"},
}
# Foreign libraries that may be imported in these files and folders only.
HOMES = {
    "fastapi": ("server", "routers"),
    "starlette": ("server", "routers"),
    "sse_starlette": ("routers",),
    "uvicorn": ("server",),
    "prometheus_client": ("server", "routers/operations.py", "multimodal/metrics.py"),
    "prometheus_fastapi_instrumentator": ("server",),
    "pydantic_settings": ("server/settings", "server/cli.py", "server/commands", "server/sweep"),
    "zmq": ("engine",),
    "nats": ("engine/replicas/publisher",),
    "httpx": ("multimodal/media",),
    "websockets": ("engine/replicas/client.py", "routers/proxy/websocket.py"),
    "httptools": ("engine/replicas/client.py", "server/http/connection.py", "server/bench/client.py"),
    "dynamo": ("routers/dynamo",),
    "soundfile": ("engine/kit/audio_file.py",),
    "soxr": ("engine/kit/audio_file.py",),
    "tensorrt_llm": ("engine/trtllm",),
    "opentelemetry": ("server/http/tracing.py",),
    "av": ("engine/visual/files.py",),
    "diffusers": ("engine/visual/with_diffusers.py",),
    "torch": ("engine/embedded", "engine/trtllm", "engine/visual/with_diffusers.py"),
    "xgrammar": ("engine/embedded",),
    "llguidance": ("engine/embedded",),
    "triton": ("engine/embedded/models/cuda",),
    "flashinfer": ("engine/embedded/models/cuda",),
    "transformers": ("engine/embedded", "engine/visual/with_diffusers.py", "multimodal"),
    "cv2": ("engine/kit/video_file.py",),
}
FORBIDDEN_IMPORTS = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve"}
MODELS = {"smolaudio", "smoldraw", "smoleagle", "smolvideo", "smolvision"}
"""Packages of models that are trained here: nothing imports them."""
FORBIDDEN_CALLS = {"eval", "exec", "torch.load"}
READS_ENVIRONMENT = {
    "server/settings/environment.py": "beside pydantic-settings",
    "engine/embedded/models/cuda/flashinfer_kernels.py": "as FlashInfer reads how many compilers may run",
    "engine/kit/video_file.py": "to keep FFmpeg quiet, which has no other switch",
    "engine/process/tree.py": "to mark what a host starts",
    "engine/trtllm/probe.py": "what NVIDIA's container has set, for its report",
}
BACKENDS = ("engine/embedded", "engine/trtllm", "engine/fake")
PRODUCT = [path for package in MAY_IMPORT for path in sorted((ROOT / package).rglob("*.py"))]


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def walked(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(parsed(path)))


@pytest.fixture(scope="module", autouse=True)
def forget() -> Iterator[None]:
    yield
    walked.cache_clear()
    parsed.cache_clear()


def dotted(node: ast.AST) -> str:
    """`a.b.c` of names and attributes; empty for all else."""
    if isinstance(node, ast.Attribute):
        return f"{before}.{node.attr}" if (before := dotted(node.value)) else ""
    return node.id if isinstance(node, ast.Name) else ""


def imports(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Dotted names of all imports among nodes; `from a import b` is a.b."""
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported_at_once(nodes: list[ast.stmt]) -> Iterator[str]:
    """Dotted names that importing a module imports: not those in functions, nor those for type checkers."""
    for node in nodes:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imports([node])
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from imported_at_once(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from imported_at_once([child for child in ast.iter_child_nodes(node) if isinstance(child, ast.stmt)])


def within(file: str, homes: tuple[str, ...]) -> bool:
    return any(file == home or file.startswith((home + "/", home + ".")) for home in homes)


def test_imports_point_one_way() -> None:
    wrong = [
        f"{name(path)} imports {module}"
        for path in PRODUCT
        for module in imports(walked(path))
        if module.split(".")[0] in {*MAY_IMPORT, *MODELS, "benchmarks", "tests"} - MAY_IMPORT[name(path).split("/")[0]]
    ]
    assert wrong == []


def test_libraries_stay_at_home() -> None:
    found = {
        (library, name(path))
        for path in PRODUCT
        for module in imports(walked(path))
        if (library := module.split(".")[0]) in HOMES
    }
    assert [(library, file) for library, file in sorted(found) if not within(file, HOMES[library])] == []
    unused = [
        (library, home)
        for library, homes in HOMES.items()
        for home in homes
        if not any(library == imported and within(file, (home,)) for imported, file in found)
    ]
    assert unused == [], "homes of libraries that are not imported there"


def test_only_the_roles_ask_for_the_role() -> None:
    askers = {
        name(path)
        for path in PRODUCT
        for node in walked(path)
        if isinstance(node, ast.Attribute) and node.attr == "disaggregation_mode"
    }
    assert askers == {"server/roles.py"}


def test_wire_types_of_clients_stay_above_the_routers() -> None:
    """Below them there are only messages between replicas, and frames between processes."""
    below = {
        (name(path), module)
        for path in PRODUCT
        if within(name(path), ("multimodal", "engine"))
        for module in imports(walked(path))
        if module.split(".")[0] == "protocol"
    }
    internal = ("protocol/internal", "protocol/frames", "protocol/errors/ErrorEnvelope")
    assert [(file, module) for file, module in below if not within(module.replace(".", "/"), internal)] == []
    assert len(below) > 5, "imports are found"


def test_backends_do_not_know_each_other() -> None:
    wrong = [
        f"{name(path)} imports {module}"
        for path in PRODUCT
        for own in BACKENDS
        if within(name(path), (own,))
        for module in imports(walked(path))
        if within(module.replace(".", "/"), tuple(other for other in BACKENDS if other != own))
    ]
    assert wrong == []


def test_modules_do_not_import_each_other_in_circles() -> None:
    modules = {name(path).removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in PRODUCT}
    graph = {
        module: {
            found
            for imported in imported_at_once(parsed(path).body)
            if (found := imported if imported in modules else imported.rpartition(".")[0]) in modules
        }
        for module, path in modules.items()
    }
    assert len(graph["server.app"]) > 5, "imports are found"
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the modules


def test_a_class_name_means_one_thing() -> None:
    """Names that differ only by leading or trailing underscores count as equal."""
    homes: dict[str, set[str]] = {}
    for path in PRODUCT:
        for node in walked(path):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name.strip("_"), set()).add(name(path))
    doubles = {each: sorted(files) for each, files in homes.items() if len(files) > 1}
    assert doubles == {}


def test_data_is_never_executed() -> None:
    wrong = []
    for path in PRODUCT:
        nodes = walked(path)
        wrong += [
            f"{name(path)} imports {module}" for module in imports(nodes) if module.split(".")[0] in FORBIDDEN_IMPORTS
        ]
        calls = (dotted(node.func) for node in nodes if isinstance(node, ast.Call))
        wrong += [f"{name(path)} calls {call}" for call in calls if call in FORBIDDEN_CALLS]
    assert wrong == []


def test_the_environment_is_read_in_one_place() -> None:
    readers = {
        name(path)
        for path in PRODUCT
        for node in walked(path)
        if (isinstance(node, ast.Attribute) and dotted(node) in {"os.environ", "os.environb", "os.getenv"})
        or (
            isinstance(node, ast.ImportFrom)
            and node.module == "os"
            and {a.name for a in node.names} & {"environ", "environb", "getenv"}
        )
    }
    assert readers == READS_ENVIRONMENT.keys()


@pytest.mark.parametrize("module", ["server.app", "server.cli", "engine.fake", "engine.process.host"])
def test_no_model_library_is_loaded_before_a_backend_is_chosen(module: str) -> None:
    heavy = {"numpy", "torch", "transformers", "diffusers", "av", "xgrammar", "llguidance", "gguf", "tensorrt_llm"}
    code = f"import sys, {module}; print(sorted({heavy} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"


def test_no_file_names_paths_of_a_developers_machine() -> None:
    needles = [f"..{'/'}shared", f"/{'work'}/", f"/{'tmp'}/w/", f"/{'root'}/"]
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.split("\0")
    if not any(files):
        pytest.skip("not a git checkout")
    texts = {
        file: (ROOT / file).read_text(encoding="utf-8", errors="replace") for file in files if (ROOT / file).is_file()
    }
    assert [(file, needle) for file, text in texts.items() for needle in needles if needle in text] == []


def test_tests_leave_private_names_alone() -> None:
    """Exceptions reach into foreign libraries, or into a class whose state only its test needs."""
    own = {"self", "cls"}
    public = {"_exit", "_replace"}  # of the standard library, and documented
    found = [
        f"{name(path)}:{node.lineno} {ast.unparse(node)}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if "fake_trtllm" not in path.parts and re.search(r"(?<!\bself)(?<!\bcls)\s*\.\s*_(?!_)", path.read_text())
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in public
        and not (isinstance(node.value, ast.Name) and node.value.id in own)
    ]
    assert len(found) < 50, "\n".join(found)
