"""The rendered chart runs: commands, variables and volumes of the examples start servers here. Their probes are
requested and their processes stopped as by the kubelet, and an endpoint picker finds its metrics.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import zmq
import zmq.asyncio

from engine.process.sockets import free_port
from server.health.canary import tiny_image
from server.settings import Settings
from tests.deploy.test_helm import CHART, of_kind, templates
from tests.support.servers import ROOT, metric, wait_metric
from tests.support.waiting import slowness

IMAGE = (ROOT / "Dockerfile").read_text()
SECRETS = {"API_KEYS": "key", "INTERNAL_SECRET": "a secret of the replicas"}
"""What the Secret has. There is no HF_TOKEN, which is optional."""
KEY = {"Authorization": "Bearer key"}
PORTS = ("8000", "5557", "5657")
POD_IP = "127.0.0.1"


class Pod:
    """The container of a pod template as a process here, as the kubelet would run it. Volumes are folders below
    `folder`, ports are free ones, and `hosts` says what stands for names in DNS.
    """

    def __init__(
        self,
        template: dict[str, Any],
        folder: Path,
        hosts: Mapping[str, str],
        engine: str,
        command: list[str] | None = None,
    ) -> None:
        spec = template["spec"]
        (self.container,) = spec["containers"]
        self.grace: int = spec["terminationGracePeriodSeconds"]
        self.ports = {port: free_port() for port in PORTS}
        self.url = f"http://{POD_IP}:{self.ports['8000']}"
        self._paths = {"/tmp": str(folder / "tmp")}
        for mount in self.container["volumeMounts"]:
            if mount["mountPath"] != "/dev/shm":
                self._paths[mount["mountPath"]] = path = str(folder / mount["name"])
                Path(path).mkdir(parents=True, exist_ok=True)
        self.environment = self._environment(hosts)
        self.environment["ENGINE"] = engine
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            command or [*self._entry_point(), *self.container["args"]],
            cwd=self._paths["/cache"],
            env=self.environment | {"PYTHONPATH": str(ROOT), "TMPDIR": self._paths["/tmp"]},
            stderr=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _entry_point(self) -> list[str]:
        """The image's, for which the chart's `args` are."""
        assert "command" not in self.container
        (entry,) = set(re.findall(r'^ENTRYPOINT \["(\w+)"\]$', IMAGE, re.MULTILINE))
        assert entry == "trellis" and 'trellis = "trellis:main"' in (ROOT / "pyproject.toml").read_text()
        return [sys.executable, "-m", "server"]

    def _environment(self, hosts: Mapping[str, str]) -> dict[str, str]:
        (image,) = {line for line in re.findall(r"^ENV (HOST=.*)", IMAGE, re.MULTILINE) if "/app" not in line}
        found = dict(pair.split("=", 1) for pair in image.split())
        found["PATH"] = os.environ["PATH"]
        for entry in self.container["env"]:
            if "value" in entry:
                found[entry["name"]] = re.sub(r"\$\((\w+)\)", lambda name: found[name[1]], entry["value"])
            elif "fieldRef" in (source := entry["valueFrom"]):
                assert source == {"fieldRef": {"fieldPath": "status.podIP"}}
                found[entry["name"]] = POD_IP
            elif (key := source["secretKeyRef"]["key"]) in SECRETS:
                found[entry["name"]] = SECRETS[key]
            else:
                assert source["secretKeyRef"]["optional"], f"a pod without {key} would not start"
        return {name: self._here(value, hosts) for name, value in found.items() if name != "HOST"} | {"HOST": POD_IP}

    def _here(self, value: str, hosts: Mapping[str, str]) -> str:
        for host, url in hosts.items():
            value = value.replace(f"dns+http://{host}:8000", url)
        for port, mine in self.ports.items():
            value = re.sub(rf"(^|:){port}(?=$|@)", rf"\g<1>{mine}", value)
        path = next((path for path in self._paths if value == path or value.startswith(f"{path}/")), "")
        return value.replace("tcp://*", f"tcp://{POD_IP}") if not path else self._paths[path] + value[len(path) :]

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stderr:
            self.lines.extend(stderr)

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def probe(self, kind: str) -> bool:
        """Whether a probe succeeds."""
        probe = self.container[f"{kind}Probe"]
        (port,) = [one for one in self.container["ports"] if one["name"] == probe["httpGet"]["port"]]
        url = f"http://{POD_IP}:{self.ports[str(port['containerPort'])]}{probe['httpGet']['path']}"
        try:
            return 200 <= httpx.get(url, timeout=probe["timeoutSeconds"] * slowness()).status_code < 400
        except httpx.TransportError:
            return False

    def wait(self, kind: str, seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds * slowness()
        while not self.probe(kind):
            assert self.process.poll() is None and time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def stop(self) -> int:
        """The exit code after the signal that follows preStop, within the grace."""
        self.process.send_signal(signal.SIGTERM)
        return self.end()

    def end(self) -> int:
        code = self.process.wait(self.grace * slowness())
        self._reader.join(5)
        return code


@contextmanager
def pods(name: str, folder: Path, engine: str, *roles: str) -> Iterator[dict[str, Pod]]:
    """A started pod of each of these roles of an example, in this order; those before stand for the names in DNS."""
    workloads = {one["metadata"]["labels"]["app.kubernetes.io/component"]: one for one in of_kind(name, "Deployment")}
    found: dict[str, Pod] = {}
    hosts: dict[str, str] = {}
    try:
        for role in roles:
            template = templates(workloads[role])[0]
            found[role] = Pod(template, folder / role, hosts, engine)
            for service in of_kind(name, "Service"):
                if service["spec"]["selector"].items() <= template["metadata"]["labels"].items():
                    hosts[service["metadata"]["name"]] = found[role].url
        yield found
    finally:
        for pod in found.values():
            kill(pod.process)


def kill(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """End what still runs, with what it has started."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    for one in (process, *children):
        with suppress(psutil.NoSuchProcess):
            one.kill()
    process.wait()


def test_the_laptops_pod_starts_answers_and_drains(tmp_path: Path, smollm2: Path) -> None:
    """With the embedded engine and its model, which a former pod has converted and compiled."""
    cache = tmp_path / "aggregated/cache"
    cache.mkdir(parents=True)
    for path in Settings().cache_dir.iterdir():
        if path.is_dir() or path.suffix == ".so":
            (cache / path.name).symlink_to(path)
    (secret,) = of_kind("laptop", "Secret")
    kept = secret["stringData"]
    with pods("laptop", tmp_path, "embedded", "aggregated") as found:
        pod = found["aggregated"]
        assert not pod.probe("startup"), "nothing listens yet"
        pod.wait("startup", 120)
        assert pod.probe("readiness") and pod.probe("liveness")
        assert kept.keys() <= {"API_KEYS", "INTERNAL_SECRET", "HF_TOKEN"}
        body = {
            "model": "smollm2",
            "messages": [{"role": "user", "content": "Count."}],
            "max_tokens": 60,
            "ignore_eos": True,
        }
        assert httpx.post(f"{pod.url}/v1/chat/completions", json=body).status_code == 401
        with httpx.stream(
            "POST", f"{pod.url}/v1/chat/completions", json={**body, "stream": True}, headers=KEY, timeout=60
        ) as stream:
            lines = stream.iter_lines()
            assert next(lines).startswith("data: ")
            pod.process.send_signal(signal.SIGTERM)
            while pod.probe("readiness"):
                time.sleep(0.01)
            assert pod.probe("liveness"), "or it would be killed while it drains"
            assert [line for line in lines if line][-1] == "data: [DONE]", "what runs is finished"
        assert pod.end() == 0, pod.log


def test_pods_of_encode_prefill_and_decode_find_each_other(tmp_path: Path) -> None:
    """By the names of services. An image goes through all three, and what autoscalers ask for is there."""
    url = f"data:image/png;base64,{b64encode(tiny_image()).decode()}"
    content = [{"type": "text", "text": "what is this? " * 9}, {"type": "image_url", "image_url": {"url": url}}]
    body = {"model": "smolvision", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    with pods("encode", tmp_path, "fake", "encode", "prefill", "decode") as found:
        for pod in found.values():
            pod.wait("startup")
        decode, prefill, encode = found["decode"], found["prefill"], found["encode"]
        wait_metric(decode.url, "trtllm_prefill_peer_available", 1)
        answer = httpx.post(f"{decode.url}/v1/chat/completions", json=body, headers=KEY, timeout=60)
        assert answer.status_code == 200, answer.text
        assert metric(encode.url, "trtllm_encoded_images_total") == 1
        assert metric(decode.url, "trtllm_prefill_requests_total") == 1
        assert metric(decode.url, "trtllm_prefill_local_total") == 0
        for name, pod in found.items():
            (scaled,) = [
                one["spec"]["triggers"]
                for one in of_kind("encode", "ScaledObject")
                if one["metadata"]["name"].endswith(name)
            ] or [[]]
            page = httpx.get(f"{pod.url}/metrics").text
            assert all(re.search(r"sum\((\w+)", one["metadata"]["query"])[1] in page for one in scaled)  # type: ignore[index]
        assert httpx.post(f"{prefill.url}/prefill", headers=KEY).status_code == 401, "keys do not open internal routes"
        assert [found[role].stop() for role in ("decode", "prefill", "encode")] == [0, 0, 0]


GAUGES = {
    "queued": "trtllm_num_requests_waiting",
    "running": "trtllm_num_requests_running",
    "usage": "trtllm_kv_cache_utilization",
    "block_size": "trtllm_kv_cache_tokens_per_block",
    "blocks": "trtllm_kv_cache_max_blocks",
}
"""The preset `trtllm-serve` of llm-d's endpoint picker, by which it extracts metrics of pods with this label
(llm-d/llm-d-router, pkg/epp/framework/plugins/datalayer/extractor/metrics/factories.go, commit ebab687927f5)."""


async def test_an_endpoint_picker_sees_load_and_cache(tmp_path: Path) -> None:
    """The picker scrapes the five gauges, scores by queue and cache, and follows KV events for its prefix scorer."""
    (workload,) = of_kind("gateway", "Deployment")
    (pool,) = of_kind("gateway", "InferencePool")
    template = templates(workload)[0]
    labels = template["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert labels["llm-d.ai/engine-type"] == labels["inference.networking.k8s.io/engine-type"] == "trtllm-serve"
    environment = [{"name": "MAX_BATCH_SIZE", "value": "2"}, {"name": "FAKE_TOKEN_DELAY_MS", "value": "60"}]
    template["spec"]["containers"][0]["env"] += environment
    with pods("gateway", tmp_path, "fake", "aggregated") as found, ExitStack() as stack:
        pod = found["aggregated"]
        socket = stack.enter_context(zmq.asyncio.Context.instance().socket(zmq.SUB))
        socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
        socket.connect(f"tcp://{POD_IP}:{pod.ports['5557']}")
        pod.wait("startup")

        async def scrape() -> dict[str, float]:
            page = (await client.get(f"{pod.url}/metrics")).text
            values = dict(re.findall(r"^(trtllm_\w+)\{[^}]*\} (\S+)$", page, re.MULTILINE))
            return {name: float(values[gauge]) for name, gauge in GAUGES.items()}

        async def until(condition: Any) -> dict[str, float]:
            async with asyncio.timeout(30 * slowness()):
                while True:
                    if condition(seen := await scrape()):
                        return seen
                    await asyncio.sleep(0.05)

        prompt = "a prefix that many requests have in common " * 6
        body = {"model": "Qwen/Qwen3-8B", "prompt": prompt, "max_tokens": 60, "ignore_eos": True}
        async with httpx.AsyncClient(headers=KEY, timeout=60) as client:
            idle = await until(lambda seen: seen["blocks"] > 0)
            assert idle["queued"] == idle["running"] == idle["usage"] == 0 and idle["block_size"] == 32
            asked = [asyncio.create_task(client.post(f"{pod.url}/v1/completions", json=body)) for _ in range(5)]
            loaded = await until(lambda seen: seen["running"] == 2 and seen["queued"] == 3 and seen["usage"] > 0)
            assert loaded["block_size"] == idle["block_size"] and loaded["blocks"] == idle["blocks"]
            for task in asked:
                task.cancel()
            await until(lambda seen: seen["running"] == seen["queued"] == seen["usage"] == 0)

            stored: list[dict[str, Any]] = []
            async with asyncio.timeout(30 * slowness()):
                while not stored:
                    topic, number, payload = await socket.recv_multipart()
                    assert topic.decode().split("@") == ["kv", f"{POD_IP}:{pod.ports['8000']}", "Qwen/Qwen3-8B"]
                    assert len(number) == 8
                    _, events, _ = msgspec.msgpack.decode(payload)
                    stored += [event for event in events if event["type"] == "BlockStored"]
            # the fields that the picker's adapter for vLLM requires of an event
            event = stored[0]
            assert event["parent_block_hash"] is None and event["block_size"] == idle["block_size"]
            assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"] > 0
            tokenized = await client.post(f"{pod.url}/tokenize", json={"model": body["model"], "prompt": prompt})
            assert tokenized.json()["tokens"][: len(event["token_ids"])] == event["token_ids"]
        assert pod.stop() == 0, pod.log


STUBS = {
    "mpirun": 'echo "" "$@" > "$STUBS/mpirun.log"\nwhile [ "$1" != trtllm-llmapi-launch ]; do shift; done\n"$@"',
    "trtllm-llmapi-launch": 'command="$*"\n$command',  # as the real one, which splits at spaces
    "trellis": f'exec {sys.executable} -m server "$@"',
    "ssh": 'echo "$@" >> "$STUBS/ssh.log"\n[ "$(wc -l < "$STUBS/ssh.log")" -gt 1 ]',
    "sshd": 'echo "$@" >> "$STUBS/sshd.log"',
    "sleep": "exit 0",
    "ssh-keygen": 'for last; do :; done\ntouch "$last"',
}
"""What NVIDIA's image has, and this machine lacks. The first worker is not there at once."""


def test_the_leader_of_several_nodes_starts_ranks_and_drains_the_server_first(tmp_path: Path) -> None:
    """The scripts of the chart, with stand-ins for MPI and ssh. Never run on a real group."""
    (group,) = [one for one in of_kind("multinode", "LeaderWorkerSet") if one["metadata"]["name"].endswith("decode")]
    leader, worker = templates(group)
    (scripts,) = [one for one in of_kind("multinode", "ConfigMap") if one["metadata"]["name"].endswith("multinode")]
    places = {name: tmp_path / name for name in ("scripts", "ssh", "tmp", "bin", "cache")}
    for place in places.values():
        place.mkdir()
    for name, text in scripts["data"].items():
        assert text.strip() == (CHART / "files/multinode" / name).read_text().strip()
        text = re.sub(r"(?<![\w}])/(scripts|ssh|tmp)/", lambda volume: f"{places[volume[1]]}/", text)
        (places["scripts"] / name).write_text(text)
    for name in ("ssh-privatekey", "ssh-publickey"):
        (places["ssh"] / name).write_text(name)
    for name, text in STUBS.items():
        (places["bin"] / name).write_text(f"#!/bin/bash\n{text}\n")
        (places["bin"] / name).chmod(0o755)
    (entry,) = re.findall(r'^ENTRYPOINT \["([^"]+)", "trellis"\]$', IMAGE, re.MULTILINE)
    container = leader["spec"]["containers"][0]
    given = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    port = free_port()
    environment = {
        "PATH": f"{places['bin']}:{os.environ['PATH']}",
        "HOME": str(places["cache"]),
        "STUBS": str(places["bin"]),
        "PYTHONPATH": str(ROOT),
        "LWS_LEADER_ADDRESS": "trellis-decode-0.trellis-decode.default",
        "LWS_GROUP_SIZE": str(group["spec"]["leaderWorkerTemplate"]["size"]),
        "GPUS_PER_NODE": given["GPUS_PER_NODE"],
        "HF_TOKEN": "t",
        "ENGINE": "fake",
        "PORT": str(port),
        "CACHE_DIR": str(places["cache"]),
    }

    def here(command: list[str]) -> list[str]:
        return [part.replace("/scripts/", f"{places['scripts']}/") for part in command]

    assert container["command"][0] == entry, "which chooses the driver library, and then runs the rest"
    server = subprocess.Popen(here(container["command"][1:]), env=environment, cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60 * slowness()
        while True:
            try:
                assert httpx.get(f"http://127.0.0.1:{port}{container['startupProbe']['httpGet']['path']}").is_success
                break
            except (httpx.TransportError, AssertionError):
                assert server.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
        arguments = (places["bin"] / "mpirun.log").read_text()
        hosts = ",".join(f"trellis-decode-0{n}.trellis-decode.default:4" for n in ("", "-1", "-2", "-3"))
        assert f"-n 16 -H {hosts} " in arguments
        assert "-x HF_TOKEN" in arguments and "-x STUBS" not in arguments
        workers = (places["bin"] / "ssh.log").read_text().splitlines()
        assert [line.split()[-2] for line in workers] == [
            f"trellis-decode-0-{n}.trellis-decode.default" for n in (1, 1, 2, 3)
        ]
        assert (places["cache"] / ".ssh/id").stat().st_mode & 0o777 == 0o600
        stop = here(container["lifecycle"]["preStop"]["exec"]["command"])
        subprocess.run(stop, env=environment, check=True, timeout=30 * slowness())
        assert server.wait(10 * slowness()) == 0, "the server has ended before any rank gets a signal"
    finally:
        kill(server)
    begun = subprocess.run(here(worker["spec"]["containers"][0]["command"][1:]), env=environment, check=True)
    assert begun.returncode == 0 and "-D -e" in (places["bin"] / "sshd.log").read_text().splitlines()[-1]
