"""Container image, compose file, proxy and settings agree with one another."""

import json
import re
import resource
from pathlib import Path
from typing import Any

import yaml

from engine.config import TrtllmConfig
from engine.process import child
from server.doctor import check_limits
from server.roles import missing_setting
from server.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
CONFIGURATION = (ROOT / "deploy/nginx/trellis.conf").read_text()


def of_settings(service: dict[str, Any]) -> set[str]:
    """Names of the settings that a service gets, beside variables of the Hugging Face hub's library."""
    return {name.lower() for name in service["environment"] if not name.startswith("HF_")}


def test_our_services_share_the_env_file_and_stay_reachable() -> None:
    """What `.env` says of the server's address and folders must not reach a container, and its secrets must."""
    services = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    ours = [service for service in services.values() if "build" in service]
    assert len(ours) == 9
    for service in ours:
        assert service["env_file"] == [{"path": ".env", "required": False}]
        fixed = {"HOST": "0.0.0.0", "PORT": "8000", "CACHE_DIR": "/cache"}
        assert fixed.items() <= service["environment"].items()
        assert service["environment"]["HF_HOME"].startswith("/cache/"), "models outlive the container"


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
        named = {name.lower() for name in of_target} - {"pythonunbuffered", "path"}
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
    """Both targets name their base's version, end as a user by number, and ask for liveness, which needs no API key."""
    image = (ROOT / "Dockerfile").read_text()
    stages = [stage for stage in re.split(r"^(?=FROM )", image, flags=re.MULTILINE) if " AS build\n" not in stage][1:]
    assert len(stages) == 2
    assert all(re.match(r"FROM \S+:(?!latest)\S*\d\S* AS (cpu|trtllm)\n", stage) for stage in stages)
    assert all(re.findall(r"^USER (.*)$", stage, re.MULTILINE) == ["10001"] for stage in stages)
    assert all("/health/live" in stage.partition("HEALTHCHECK")[2] for stage in stages)


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


def test_the_image_has_every_package() -> None:
    copied = re.findall(r"^COPY (\w+) \1$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    packages = sorted(
        path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name not in {"benchmarks", "tests"}
    )
    assert sorted([*copied, "smolvision"]) == sorted(packages * 2), "the small model is the CPU image's alone"
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"!{package}" for package in packages} <= set(ignored)
