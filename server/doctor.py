"""`trellis doctor`: checks whether this machine fits the settings, and names a cure for each problem.

The `check_*` functions judge facts and are pure, unless they say what they read; `findings` gathers the facts. Nothing
is loaded, downloaded or changed, and no GPU memory is used: it can run beside a server, whose port it then reports as
taken.
"""

import asyncio
import json
import math
import os
import re
import resource
import shutil
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from engine.checkpoints.conversions import ModelError
from engine.checkpoints.hub import is_hub_id
from engine.checkpoints.packaged import PACKAGED, chain, how_to_get
from engine.checkpoints.pipelines import pipeline_bytes, pipeline_class, present_pipeline
from engine.checkpoints.store import downloaded, weight_bytes
from engine.errors import EngineFailure
from engine.trtllm.arguments import Effective
from server import __version__
from server.compose.dynamo import any_answers
from server.compose.engine_args import Parallelism, effective, parallelism
from server.compose.model import model_here
from server.compose.sizing import ChosenValue, Machine, embedding_transfer, on_gpu, survey
from server.preflight import Finding, impossible
from server.process.banner import warning as open_to_strangers
from server.process.gpus import Gpu, shortage
from server.process.serving import listen
from server.roles import missing_setting, role_of
from server.settings import EngineArgsError, Settings
from server.settings.environment import visible_devices
from server.settings.reading import misspelt_variables

SUPPORTED = "1.2.1"
"""The release of TensorRT-LLM that the backend is written for."""
IMAGE = f"nvcr.io/nvidia/tensorrt-llm/release:{SUPPORTED}"
GIB = 1024**3
_OLDEST_PYTHON = (3, 11)
_OLDEST_DRIVER = 575  # asked for by NVIDIA's deployment guides
_OLDEST_CAPABILITY = 8.0  # Ampere: bfloat16
_MULTI_GPU_SHM = GIB  # NCCL and the workers' queues; docker gives 64 MiB
_STACK = 64 * 1024**2  # as NVIDIA's images are started
_FILES = 4096
_HUB_SECONDS = 5.0
_LEAST_FREE = GIB
_LARGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
_ROOMY_DISK, _LEAST_DISK = 20 * GIB, 2 * GIB


def run(settings: Settings, *, probe: bool = False) -> int:
    """Print the findings; 1 if there is a problem, else 0. With `probe`, then check TensorRT-LLM on its GPU."""
    found = list(findings(settings))
    counts = [sum(finding.level == level for finding in found) for level in ("problem", "warning")]
    sys.stdout.writelines(f"{finding}\n" for finding in found)
    sys.stdout.write(f"\nproblems: {counts[0]}, warnings: {counts[1]}\n")
    return int(counts[0] > 0) or (_probe(settings) if probe else 0)


def _probe(settings: Settings) -> int:
    """Run the checks that need TensorRT-LLM and a GPU, and write their report into this folder."""
    from engine.trtllm import probe  # noqa: PLC0415 - seldom needed

    sys.stdout.write(f"checking TensorRT-LLM with {settings.model}: at most {probe.SECONDS / 60:.0f} minutes\n")
    sys.stdout.flush()
    status = probe.run(settings.model, Path.cwd())
    sys.stdout.write(f"see {probe.REPORT}.md, and attach it with {probe.REPORT}.json to an issue\n")
    return status


def findings(settings: Settings) -> Iterator[Finding]:
    """Yield the results of all checks, in the order in which a start would fail."""
    needs_gpu = settings.engine == "trtllm" or settings.device.startswith("cuda")
    ranks, machine = 1, survey()
    yield check_python((sys.version_info.major, sys.version_info.minor))
    yield from check_packages(settings, machine)
    yield from check_bytecode("torch")
    yield check_machine(machine)
    gpus = machine.gpus or ()
    if machine.gpus is None and machine.driver:
        yield Finding(
            "problem" if needs_gpu else "warning",
            "NVIDIA's driver is loaded, but nvidia-smi does not answer",
            "run nvidia-smi: it must list the GPUs within 30 s",
        )
    elif gpus or not machine.hidden:
        yield from check_gpus(gpus, needed=needs_gpu)
    else:
        yield check_hidden(machine.hidden, visible_devices(), needed=needs_gpu)
    if settings.engine == "trtllm":
        yield check_tensorrt_llm(installed("tensorrt_llm"))
        try:
            needs = parallelism(settings)
        except EngineArgsError as error:
            cure = "correct it; `config` shows which layer sets what"
            yield from (Finding("problem", fault, cure) for fault in error.faults)
        else:
            ranks = needs.ranks
            yield from check_role(settings)
            if gpus:
                yield check_parallelism(len(gpus), needs)
    else:
        yield from check_role(settings)
    if settings.engine != "fake":
        pictures = role_of(settings).core == "visual"
        yield from check_pipeline(settings.model, settings.cache_dir) if pictures else check_model(settings.model)
        folder = model_here(settings) or Path(settings.model).expanduser()
        if gpus or not needs_gpu:  # else that is the problem
            yield from impossible(settings, machine, folder if folder.is_dir() else None)
        if settings.engine == "embedded" and not pictures and not on_gpu(settings, machine):
            yield check_compiler()
        if (needs_gpu or on_gpu(settings, machine)) and gpus and folder.is_dir():
            weights = pipeline_bytes(folder) if pictures else weight_bytes(folder)
            yield from check_memory(weights, min(gpu.memory for gpu in gpus), ranks)
    if (way := embedding_transfer(settings, machine)) is not None:
        yield check_embeddings(way)
    if settings.memory_service is not None:
        yield check_memory_service(settings.memory_service)
        if not on_gpu(settings, machine):
            yield check_large_pages(_LARGE_PAGES)
    yield check_port(settings.host, settings.port)
    if settings.dynamo:
        yield check_dynamo(settings)
    if settings.engine == "trtllm":
        yield check_shared_memory(free_bytes(Path("/dev/shm")), ranks)
        yield from check_limits(
            resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.getrlimit(resource.RLIMIT_STACK)[0]
        )
    yield from check_environment(settings)
    yield check_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    yield check_disk(settings.cache_dir)


def check_environment(settings: Settings) -> Iterator[Finding]:
    """Yield the warnings of a start: variables that nothing reads, and a server that is open to strangers."""
    for sentence in misspelt_variables():
        yield Finding("warning", sentence, "correct its name, or ignore this if another program reads it")
    if role_of(settings).is_public and (sentence := open_to_strangers(settings)):
        text, _, cure = sentence.partition("; ")
        yield Finding("warning", text, cure)


def check_python(version: tuple[int, int]) -> Finding:
    text = f"Python {version[0]}.{version[1]}"
    if version < _OLDEST_PYTHON:
        return Finding("problem", text, "install Python {}.{} or newer, or use a container".format(*_OLDEST_PYTHON))
    return Finding("ok", text)


def check_bytecode(package: str) -> Iterator[Finding]:
    """Check that an installed package, which is not imported, does not have to be compiled at each start."""
    found = find_spec(package)
    if found is None or found.cached is None or os.path.exists(found.cached):
        return
    folder = os.path.dirname(str(found.origin))
    if sys.dont_write_bytecode or not os.access(folder, os.W_OK):
        cure = f"run once, as its owner: {sys.executable} -m compileall -q {folder}"
        yield Finding("warning", f"{package} was installed without bytecode: each start compiles it, for seconds", cure)


def check_gpus(gpus: tuple[Gpu, ...], *, needed: bool) -> Iterator[Finding]:
    """Check driver, compute capability, and that the GPUs are alike. No GPU is a problem only if one is `needed`."""
    if not gpus:
        cure = "install NVIDIA's driver (nvidia-smi must list the GPUs); in a container also its Container Toolkit, "
        cure += "and --gpus all"
        missing = Finding("problem", "no NVIDIA GPU answers", cure)
        yield missing if needed else Finding("ok", "no NVIDIA GPU: runs on the CPU")
        return
    names = sorted({gpu.name for gpu in gpus})
    least = min(gpu.memory for gpu in gpus)
    memory = f"{least / GIB:.0f} GiB each" if least else "memory unknown"
    text = f"{len(gpus)} GPU(s): {', '.join(names)}, {memory}, driver {gpus[0].driver}"
    if needed and min(gpu.capability for gpu in gpus) < _OLDEST_CAPABILITY:
        text += f": compute capability below {_OLDEST_CAPABILITY}"
        yield Finding("problem", text, "use GPUs of the Ampere generation or newer")
    elif needed and int(gpus[0].driver.split(".")[0]) < _OLDEST_DRIVER:
        cure = f"driver {_OLDEST_DRIVER} or newer; older ones need CUDA's forward compatibility"
        yield Finding("warning", text, cure)
    elif needed and len(names) > 1:
        yield Finding("warning", text, "one replica on GPUs of one kind: choose with CUDA_VISIBLE_DEVICES")
    else:
        yield Finding("ok", text)


def check_hidden(present: int, devices: str | None, *, needed: bool) -> Finding:
    text = f"CUDA_VISIBLE_DEVICES={devices} shows none of {present} GPU(s)"
    cure = f"unset it, or name GPUs from 0 to {present - 1}"
    return Finding("problem", text, cure) if needed else Finding("ok", text)


def installed(package: str) -> str | None:
    """Return the version of an installed package without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def check_tensorrt_llm(version: str | None) -> Finding:
    if version is None:
        cure = f"run in {IMAGE}, or build the Dockerfile's target trtllm"
        return Finding("problem", "tensorrt_llm is not installed", cure)
    text = f"tensorrt_llm {version}"
    if re.fullmatch(rf"{re.escape(SUPPORTED)}([.+].*)?", version):  # also a rebuild of it, 1.2.1.post1
        return Finding("ok", text)
    cure = f"use {SUPPORTED}, whose names and defaults the backend knows: {IMAGE}"
    return Finding("warning" if version.startswith("1.2.") else "problem", f"{text}, not {SUPPORTED}", cure)


def check_role(settings: Settings) -> Iterator[Finding]:
    """Check that the role's settings are complete, and list the engine arguments that it forces."""
    role, lacking = role_of(settings), missing_setting(settings)
    if not role.needs and lacking is None:
        return
    found = effective(settings) if settings.engine == "trtllm" else Effective()
    effects = [
        f"forces {path} to {json.dumps(found.value(path))}"
        for path, layer in sorted(found.origins.items())
        if layer == "role"
    ]
    effects += [f"ignores {name}" for name in found.ignored]
    if lacking is None:
        yield Finding("ok", "; ".join([f"role {role.name}", *effects]))
    else:
        text = "; ".join([f"{lacking[0]}: {lacking[1]}", *effects])
        yield Finding("problem", text, "set it, the same on every replica")


def check_parallelism(gpus: int, needs: Parallelism) -> Finding:
    """Check that there are GPUs for all ranks, on this node or together with others."""
    if (lacking := shortage(gpus, needs)) is not None:
        return Finding("problem", *lacking)
    text = f"{needs.said} needs {needs.ranks} GPU(s), {gpus} are visible"
    if needs.per_node and needs.ranks > needs.per_node:
        nodes = -(-needs.ranks // needs.per_node)
        text += f": {nodes} nodes of {needs.per_node}, to be started with trtllm-llmapi-launch"
    return Finding("ok", text)


def check_pipeline(model: str, cache_dir: Path) -> Iterator[Finding]:
    """Check that a folder of diffusers is here, or can be fetched."""
    folder = present_pipeline(model, cache_dir)
    if folder is None:
        yield from check_model(model)
    elif not pipeline_bytes(folder):
        text = f"the folder {folder} has no weights in safetensors"
        yield Finding("problem", text, "convert them: files that can run code are not read")
    else:
        yield Finding("ok", f"model {model}: {pipeline_class(folder)} of diffusers")


def check_model(model: str) -> Iterator[Finding]:
    """Check that the model is here, or can be fetched: the files of a folder, or an id that the hub knows."""
    folder = Path(model).expanduser()
    if model in PACKAGED:
        yield _check_packaged(model)
    elif folder.is_dir():
        yield from check_folder(folder)
    elif folder.is_file():
        yield _check_gguf(folder)
    elif not is_hub_id(model) or folder.suffix == ".gguf":
        cure = "name a folder or GGUF file, mounted if in a container, or a Hugging Face id owner/name"
        yield Finding("problem", f"model {model}: no such folder or file", cure)
    else:
        yield check_hub(model)


def _check_packaged(model: str) -> Finding:
    sources = {}
    for name in chain(model):
        try:
            sources[name] = how_to_get(name)
        except ModelError as error:
            text, _, cure = str(error).rpartition(": ")
            return Finding("problem", text, cure)
    return Finding("ok", f"model {model}: built in, its weights are {sources[model]}")


def _check_gguf(path: Path) -> Finding:
    """Check the header of a GGUF file for anything that a conversion would refuse."""
    from engine.checkpoints.gguf.convert import check  # noqa: PLC0415 - imports numpy

    try:
        model = check(path)
    except EngineFailure as error:
        return Finding("problem", str(error), "see docs/models.md for what is supported")
    size = sum(part.stat().st_size for part in model.file.paths)
    types = ", ".join(sorted({tensor.type for tensor in model.file.tensors.values()}))
    return Finding(
        "ok", f"model {path}: {model.architecture}, {size / GIB:.1f} GiB of {types}, converted at its first start"
    )


def check_hub(model: str) -> Finding:
    """Check that a model of the Hugging Face hub is in the cache, or may be downloaded."""
    from huggingface_hub import HfApi  # noqa: PLC0415 - slow to import
    from huggingface_hub.utils import logging as hub_logging  # noqa: PLC0415

    if downloaded(model) is not None:
        return Finding("ok", f"model {model}: downloaded from the Hugging Face hub")
    hub_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    try:
        HfApi().model_info(model, timeout=_HUB_SECONDS)
    except Exception as error:  # of many kinds: no network, offline mode, no such id, no access
        text = f"model {model} is not a folder, and the Hugging Face hub does not offer it"
        cure = "check the id, the network, HF_TOKEN if its access is restricted, or name a folder"
        return Finding("problem", f"{text} ({type(error).__name__}: {_first_line(error)})", cure)
    return Finding("ok", f"model {model}: the Hugging Face hub has it")


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "")[:200]


def check_machine(machine: Machine) -> Finding:
    text = f"{machine.cores} cores, {machine.free / GIB:.1f} of {machine.memory / GIB:.1f} GiB of memory are free"
    if machine.free < _LEAST_FREE:
        return Finding("warning", text, "end other programs, or give the container more memory")
    return Finding("ok", text)


def check_compiler() -> Finding:
    """Check that the compiled path of a CPU can be compiled."""
    from engine.embedded.models.native.build import NoCompilerError, find_compiler  # noqa: PLC0415

    try:
        return Finding("ok", f"C++ compiler {find_compiler()}")
    except NoCompilerError as error:
        return Finding("warning", f"{error}: models are computed by transformers, which is slower", "install g++")


def check_packages(settings: Settings, machine: Machine) -> Iterator[Finding]:
    """Check that installed packages have the versions that this release asks for."""
    try:
        from packaging.requirements import Requirement  # noqa: PLC0415 - comes with the extra `embedded`

        wanted = [Requirement(text) for text in metadata.requires("trellis") or ()]
    except (ImportError, metadata.PackageNotFoundError):
        return
    extras = [""]
    if settings.engine == "embedded" and role_of(settings).has_model:
        extras += ["embedded", "gpu"] if on_gpu(settings, machine) else ["embedded"]
    extras += ["visual"] if role_of(settings).core == "visual" and settings.engine == "embedded" else []
    extras += ["otel"] if settings.otel_endpoint else []
    extras += ["dynamo"] if settings.dynamo else []
    wrong = []
    for requirement in wanted:
        marker = requirement.marker
        if marker is not None and not any(marker.evaluate({"extra": extra}) for extra in extras):
            continue
        version = installed(requirement.name)
        if version is None:
            wrong.append(f"{requirement.name}{requirement.specifier} is not installed")
        elif not requirement.specifier.contains(version, prereleases=True):
            wrong.append(f"{requirement.name} is {version}, not {requirement.specifier}")
    if wrong:
        names = ",".join(filter(None, extras))
        cure = f"pip install 'trellis{f'[{names}]' if names else ''}', or make serve, which installs tested versions"
        yield Finding("problem", "; ".join(wrong), cure)
    else:
        yield Finding("ok", f"trellis {__version__}, packages as required")


def check_folder(folder: Path) -> Iterator[Finding]:
    """Check the list of files and the index of the weights, which are read."""
    missing = [
        pattern for pattern in ("config.json", "tokenizer.json", "*.safetensors") if not any(folder.glob(pattern))
    ]
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            shards = set(json.loads(index.read_bytes())["weight_map"].values())
        except (ValueError, KeyError, TypeError, AttributeError):
            missing.append(f"readable {index.name}")
        else:
            missing += sorted(shard for shard in shards if not (folder / shard).is_file())
    if missing:
        cure = "download it again, whole, in Hugging Face format"
        yield Finding("problem", f"model folder {folder} lacks {', '.join(missing)}", cure)
    else:
        yield Finding("ok", f"model folder {folder}: {weight_bytes(folder) / GIB:.1f} GiB of weights")


def check_memory(weights: int, memory: int, ranks: int) -> Iterator[Finding]:
    """Compare the weights with a GPU's memory, both in bytes. An unknown memory (0) is not checked."""
    if not memory:
        return
    share = weights / ranks
    text = f"weights take {share / GIB:.1f} of {memory / GIB:.0f} GiB on each of {ranks} GPU(s)"
    cure = "spread over more GPUs (tensor_parallel_size), or take a quantized model"
    if share > memory:
        yield Finding("problem", text, cure)
    elif share > 0.8 * memory:
        yield Finding("warning", f"{text}: little is left for the KV cache", cure)
    else:
        yield Finding("ok", text)


def check_embeddings(way: ChosenValue) -> Finding:
    """Say how embeddings of images move between this replica and encode replicas."""
    moves = "stay with the encoder, for engines of its host" if way.value == "direct" else "go through who asks"
    return Finding("ok", f"embeddings of images {moves}: {way.why}")


def check_memory_service(path: Path) -> Finding:
    """Check that a memory service answers, by asking it."""
    from engine.memory.client import status  # noqa: PLC0415 - most replicas do without
    from engine.memory.wire import MemoryServiceError  # noqa: PLC0415

    try:
        found = status(path)
    except MemoryServiceError as error:
        text = f"MEMORY_SERVICE={path}: {error}; engines load weights of their own"
        return Finding("warning", text, f"trellis memory --memory-service {path}")
    taken, leases = sum(owned.size for owned in found.owned), sum(owned.leases for owned in found.owned)
    return Finding("ok", f"memory service at {path}: {taken / GIB:.1f} GiB of weights, {leases} lease(s)")


def check_large_pages(switch: Path) -> Finding:
    """Check that the system provides large pages for shared memory."""
    try:
        allowed = "[never]" not in switch.read_text() and "[deny]" not in switch.read_text()
    except OSError:
        allowed = False
    if allowed:
        return Finding("ok", "large pages for shared memory")
    text = "no large pages for shared memory: with MEMORY_SERVICE one stream is about 5 % slower on a CPU"
    return Finding("warning", text, f"echo advise > {switch}, as root")


def check_port(host: str, port: int) -> Finding:
    """Check the port by opening it for a moment."""
    try:
        listen(host, port).close()
    except OSError as error:
        cure = "stop what listens there, or set HOST or PORT"
        return Finding("problem", f"port {port} on {host}: {error.strerror or error}", cure)
    return Finding("ok", f"port {port} on {host} is free" if port else f"any free port on {host}")


def check_dynamo(settings: Settings) -> Finding:
    """Check that the registry of the Dynamo graph answers, if it has an address."""
    graph = f"joins the Dynamo graph {settings.dynamo_namespace} by {settings.dynamo_discovery}"
    if settings.dynamo_discovery != "etcd" or asyncio.run(any_answers(settings.dynamo_etcd)):
        return Finding("ok", graph)
    text = f"{graph}, and nothing answers at {', '.join(settings.dynamo_etcd)}"
    return Finding("problem", text, "start etcd, or set ETCD_ENDPOINTS or DYNAMO_DISCOVERY")


def free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def check_shared_memory(free: int | None, ranks: int) -> Finding:
    cure = "docker run --shm-size=16g, or --ipc=host; in Kubernetes an emptyDir of medium Memory on /dev/shm"
    if free is None:
        return Finding("problem", "there is no /dev/shm", cure)
    text = f"/dev/shm has {free / 1024**2:.0f} MiB free"
    if free >= _MULTI_GPU_SHM:
        return Finding("ok", text)
    return Finding("problem" if ranks > 1 else "warning", f"{text}; several GPUs talk through it and need 1 GiB", cure)


def check_limits(memlock: int, stack: int) -> Iterable[Finding]:
    """Check limits in bytes. RDMA and UCX send from locked memory: too little breaks KV transfer, not the start."""
    text = f"locked memory is limited to {memlock // 1024} KiB"
    cure = "docker run --ulimit memlock=-1, or ulimit -l unlimited"
    yield _check_limit(memlock, math.inf, "locked memory is unlimited", text, cure)
    text = f"stack is limited to {stack // 1024} KiB"
    cure = f"docker run --ulimit stack={_STACK}, or ulimit -s {_STACK // 1024}"
    yield _check_limit(stack, _STACK, "stack size suffices", text, cure)


def check_files(limit: int) -> Finding:
    text = f"{limit} open files allowed; each connection takes one, and each large image that is kept"
    cure = "docker run --ulimit nofile=65536, or ulimit -n 65536"
    return _check_limit(limit, _FILES, "open files suffice", text, cure)


def _check_limit(limit: int, least: float, fine: str, text: str, cure: str) -> Finding:
    enough = limit == resource.RLIM_INFINITY or limit >= least
    return Finding("ok", fine) if enough else Finding("warning", text, cure)


def check_disk(cache: Path) -> Finding:
    """Check the folder, or its nearest parent that exists."""
    place = next(folder for folder in (cache, *cache.absolute().parents) if folder.exists())
    if not os.access(place, os.W_OK):
        cure = "give it to this user, or set CACHE_DIR"
        return Finding("problem", f"cache folder {cache}: {place} cannot be written", cure)
    free = shutil.disk_usage(place).free
    text = f"cache folder {cache}: {free / GIB:.0f} GiB free"
    if free >= _ROOMY_DISK:
        return Finding("ok", text)
    return Finding("problem" if free < _LEAST_DISK else "warning", text, "make room, or set CACHE_DIR")
