"""Container image, compose file, proxy and settings agree with one another."""

import json
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from engine.config import TrtllmConfig
from engine.process import child
from server.doctor import check_limits
from server.http.routes import INTERNAL
from server.roles import missing_setting
from server.settings import Settings
from server.settings.environment import read_env_file

ROOT = Path(__file__).resolve().parents[2]
UNIT = ROOT / "deploy/systemd/trellis.service"
CONFIGURATION = (ROOT / "deploy/nginx/trellis.conf").read_text()


def of_settings(service: dict[str, Any]) -> set[str]:
    """Names of the settings that a service gets, beside variables of the Hugging Face hub's library."""
    return {name.lower() for name in service["environment"] if not name.startswith("HF_")}


def test_our_services_share_the_env_file_and_stay_reachable() -> None:
    """What `.env` says of the server's address and folders must not reach a container, and its secrets must."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    ours = [service for service in services.values() if "build" in service]
    assert len(ours) == 10
    for service in ours:
        assert service["env_file"] == [{"path": ".env", "required": False}]
        fixed = {"HOST": "0.0.0.0", "PORT": "8000", "CACHE_DIR": "/cache", "HF_TOKEN": "${HF_TOKEN:-}"}
        assert fixed.items() <= service["environment"].items()
        assert service["environment"]["HF_HOME"].startswith("/cache/"), "models outlive the container"
        assert "model-cache:/cache" in service["volumes"]


def test_every_container_is_confined() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    for name, service in compose["services"].items():
        assert service["read_only"] == (name != "tensorrt-llm"), name
        assert service["tmpfs"] == ["/tmp"] and service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert service["mem_limit"] and service["pids_limit"] and service["restart"] == "unless-stopped", name
        if "image" in service:
            assert re.fullmatch(r"\S+:[\w.-]*\d[\w.-]*@sha256:[0-9a-f]{64}", service["image"]), name
        written = {volume.split(":")[0] for volume in service["volumes"] if not volume.endswith(":ro")}
        assert written <= compose["volumes"].keys(), f"{name} writes to volumes alone"
    assert compose["services"]["gpu"]["deploy"] == compose["services"]["tensorrt-llm"]["deploy"]
    assert compose["services"]["gpu"]["build"]["target"] == "gpu"


def test_variables_that_compose_reads_may_stand_in_the_env_file(tmp_path: Path) -> None:
    texts = [(ROOT / name).read_text() for name in ("compose.yaml", "deploy/compose.tls.yaml")]
    named = {name for text in texts for name in re.findall(r"\$\{([A-Z_]+)", text)}
    assert {"MODEL", "TLS_FOLDER", "MEMORY_LIMIT"} <= named
    (tmp_path / ".env").write_text("".join(f"{name}=1\n" for name in sorted(named)))
    assert read_env_file(tmp_path / ".env").settings.keys() <= Settings.model_fields.keys()


def test_tls_is_what_nginx_includes() -> None:
    (replaced,) = re.findall(r"services:\n  nginx:\n(.*)", (ROOT / "deploy/compose.tls.yaml").read_text(), re.DOTALL)
    text = (ROOT / "deploy/nginx/tls.conf").read_text()
    assert re.findall(r'"\d+:(\d+)"', replaced) == re.findall(r"^listen (\d+) ssl;", text, re.MULTILINE)
    mounted = dict(re.findall(r"- ([^\s:]+|\$\{[^}]+\}):([^\s:]+):ro", replaced))
    assert mounted["./deploy/nginx/tls.conf"] == "/etc/nginx/tls/tls.conf"
    assert "include tls/*.conf;" in CONFIGURATION
    assert set(re.findall(r"certificate(?:_key)? (\S+)/", text)) == {list(mounted.values())[1]}


def test_nginx_hides_every_internal_route() -> None:
    (hidden,) = re.findall(r"location ~ (\S+metrics\S*) \{", (ROOT / "deploy/nginx/trellis.conf").read_text())
    assert all(re.match(hidden, path) for path in INTERNAL) and not re.match(hidden, "/v1/models")


def test_compose_image_proxy_and_settings_agree() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    server, nginx = compose["services"]["server"], compose["services"]["nginx"]
    image = (ROOT / "Dockerfile").read_text()
    variables = [
        dict(re.findall(r"([A-Z_]+)=(\S+)", line))
        for line in re.findall(r"^ENV (.*)", image, re.MULTILINE)
        if "PORT=" in line
    ]
    assert len(variables) == 2
    for of_target in variables:
        named = {name.lower() for name in of_target} - {"pythonunbuffered", "path", "home", "hf_home"}
        assert of_target["HOME"] == of_target["CACHE_DIR"], "nothing else can be written"
        assert named | of_settings(server) <= Settings.model_fields.keys()
        assert f"server:{of_target['PORT']} " in CONFIGURATION
        assert f":{of_target['PORT']}/health/live" in server["healthcheck"]["test"][-1]
        assert server["volumes"] == [f"model-cache:{of_target['CACHE_DIR']}"]
    gpu = compose["services"]["tensorrt-llm"]
    assert {server["build"]["target"], gpu["build"]["target"]} <= set(re.findall(r" AS (\w+)", image))
    assert nginx["depends_on"]["server"]["condition"] == "service_healthy"
    assert nginx["volumes"][0].startswith("./deploy/nginx/trellis.conf:")
    assert nginx["ports"] == ["{0}:{0}".format(*re.findall(r"listen (\d+);", CONFIGURATION))]
    default = Settings()
    for service in compose["services"].values():
        if "observability" not in service.get("profiles", ()):  # those two have no requests to finish
            assert int(service["stop_grace_period"].removesuffix("s")) > default.shutdown_grace_seconds
    assert f"client_max_body_size {default.max_body_mb:.0f}m;" in CONFIGURATION
    (kept,) = re.findall(r"keepalive_timeout (\d+)s;  # less", CONFIGURATION)
    assert int(kept) < default.keep_alive_seconds


def test_tensorrt_llm_starts_as_the_doctor_wants_it() -> None:
    """With GPUs, the host's shared memory and limits that suffice, and engine arguments that are there."""
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["tensorrt-llm"]
    assert service["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]
    environment = service["environment"]
    assert environment["ENGINE"] == "trtllm" and service["ipc"] == "host"
    assert of_settings(service) <= Settings.model_fields.keys()
    limits = {name: resource.RLIM_INFINITY if value == -1 else value for name, value in service["ulimits"].items()}
    assert {finding.level for finding in check_limits(limits["memlock"], limits["stack"])} == {"ok"}
    (mounted,) = [volume.split(":") for volume in service["volumes"] if volume.startswith("./")]
    arguments = environment["EXTRA_ENGINE_ARGS"].partition(":-")[2].removesuffix("}")
    assert arguments.startswith(mounted[1]) and (ROOT / mounted[0] / arguments.removeprefix(f"{mounted[1]}/")).is_file()


def test_the_disaggregated_replicas_find_each_other_and_nginx_finds_decode() -> None:
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())
    prefill, decode, gateway = (compose["services"][name] for name in ("prefill", "decode", "gateway"))
    assert {service["profiles"][0] for service in (prefill, decode, gateway)} == {"disaggregated"}
    for service, role in ((prefill, "prefill"), (decode, "decode")):
        environment = service["environment"]
        assert of_settings(service) <= Settings.model_fields.keys()
        given = {
            "internal_secret": "s",
            "disaggregation_mode": role,
            "prefill_urls": environment.get("PREFILL_URLS", ""),
        }
        assert missing_setting(Settings(**given)) is None and environment["DISAGGREGATION_MODE"] == role
        assert "INTERNAL_SECRET" in environment and service["deploy"]["replicas"] == 2
    assert decode["environment"]["PREFILL_URLS"] == "dns+http://prefill:8000"
    assert decode["networks"]["disaggregated"]["aliases"] == re.findall(r"server (\w+):8000", CONFIGURATION)
    assert gateway["volumes"] == compose["services"]["nginx"]["volumes"] and gateway["networks"] == ["disaggregated"]


def test_the_replicas_for_images_find_each_other_and_nginx_finds_decode() -> None:
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    roles = {role: services[f"epd-{role}"] for role in ("encode", "prefill", "decode")}
    decode, gateway = roles["decode"]["environment"], services["epd-gateway"]
    for role, service in roles.items():
        environment = service["environment"]
        assert of_settings(service) <= Settings.model_fields.keys()
        urls = {name: environment.get(name.upper(), "") for name in ("prefill_urls", "encode_urls")}
        given = {"internal_secret": "s", "disaggregation_mode": role, **urls}
        assert missing_setting(Settings(**given)) is None and environment["DISAGGREGATION_MODE"] == role
        assert "INTERNAL_SECRET" in environment and environment["MODEL"] == decode["MODEL"]
        assert service["profiles"] == gateway["profiles"] == ["epd"]
    assert (decode["ENCODE_URLS"], decode["PREFILL_URLS"]) == (
        "dns+http://epd-encode:8000",
        "dns+http://epd-prefill:8000",
    )
    assert roles["decode"]["networks"]["epd"]["aliases"] == re.findall(r"server (\w+):8000", CONFIGURATION)
    assert gateway["volumes"] == services["nginx"]["volumes"] and gateway["networks"] == ["epd"]
    taken = [
        service["ports"][0].removeprefix("127.0.0.1:").partition(":")[0]
        for service in services.values()
        if "ports" in service
    ]
    assert len(taken) == len(set(taken))


def test_the_image_is_pinned_and_not_roots() -> None:
    """Bases have a version and a digest; targets end as a user by number, and ask for liveness, which needs no key."""
    image = (ROOT / "Dockerfile").read_text()
    stages = dict(re.findall(r"^FROM \S+ AS (\S+)\n(.*?)(?=^FROM|\Z)", image, re.MULTILINE | re.DOTALL))
    bases = dict(re.findall(r"^FROM (\S+) AS (\S+)$", image, re.MULTILINE))
    outside = bases.keys() - stages.keys()
    assert len(outside) == 2
    assert all(re.fullmatch(r"\S+:[\w.-]*\d[\w.-]*@sha256:[0-9a-f]{64}", base) for base in outside)
    for target in ("cpu", "gpu", "trtllm"):
        assert re.findall(r"^USER (.*)$", stages[target], re.MULTILINE) == ["10001"]
    assert "USER" not in stages["base"] and list(stages)[-1] == "cpu", "the default"
    assert all("/health/live" in stages[name].partition("HEALTHCHECK")[2] for name in ("base", "trtllm"))


def test_the_gpu_image_compiles_with_the_cuda_that_torch_has() -> None:
    """FlashInfer links its kernels with the libraries below CUDA_HOME, of which torch brings one."""
    image = (ROOT / "Dockerfile").read_text()
    (home,) = re.findall(r"CUDA_HOME=(\S+)", image)
    assert f"WORKDIR {home}\n" in image
    versions = re.findall(r"nvidia-[a-z-]+==(\d+\.\d+)\.", image)
    assert len(versions) == 4 and len(set(versions)) == 1 and home.endswith(f"cu{versions[0].split('.')[0]}")


def test_tensorrt_llm_keeps_the_entry_point_of_its_image() -> None:
    """It chooses the CUDA driver library. And Ubuntu's python3-venv, which the image may lack, is not needed."""
    (stage,) = re.findall(
        r"^FROM \S+ AS trtllm\n(.*?)^FROM", (ROOT / "Dockerfile").read_text(), re.MULTILINE | re.DOTALL
    )
    (entry_point,) = re.findall(r"^ENTRYPOINT (.*)$", stage, re.MULTILINE)
    assert json.loads(entry_point) == ["/opt/nvidia/nvidia_entrypoint.sh", "trellis"]
    assert "venv --without-pip " in stage and "python -m pip install" in stage


def test_tensorrt_llm_has_the_time_that_it_may_take_to_stop() -> None:
    service = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["tensorrt-llm"]
    needed = Settings().shutdown_grace_seconds + child.STOP_SECONDS + TrtllmConfig.extra_stop_seconds
    assert int(service["stop_grace_period"].removesuffix("s")) > needed + child.KILL_SECONDS


def test_dockerignore_sends_exactly_the_files_that_the_image_copies() -> None:
    sent = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] == "!"}
    copies = re.findall(r"^COPY (?!--)(.+) \S+$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    assert {name for names in copies for name in names.split()} == sent


def test_the_systemd_unit_gives_the_server_its_time_and_settings_that_exist() -> None:
    unit = UNIT.read_text()
    (given,) = re.findall(r"^Environment=(.*)$", unit, re.MULTILINE)
    names = {pair.partition("=")[0].lower() for pair in given.split()} - {"home", "hf_home"}
    assert names <= Settings.model_fields.keys()
    (stop,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop) > Settings().shutdown_grace_seconds + child.STOP_SECONDS


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_knows_every_line_of_the_unit(tmp_path: Path) -> None:
    copy = tmp_path / UNIT.name
    copy.write_text(UNIT.read_text().replace("/opt/trellis/bin/trellis", sys.executable))
    checked = subprocess.run(["systemd-analyze", "verify", "--man=no", copy], capture_output=True, text=True)
    assert (checked.returncode, [line for line in checked.stderr.splitlines() if UNIT.name in line]) == (0, [])


def test_the_image_has_every_package() -> None:
    copied = re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    packages = sorted(
        path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in {"benchmarks", "tests"}
    )
    small = [package for package in packages if package.startswith("smol")]
    assert sorted([*copied, *small]) == sorted(packages * 2), "the small models are the CPU image's alone"
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{package}" for package in packages} <= set(ignored)
