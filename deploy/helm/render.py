"""Write the generated files of the Helm chart: `python -m deploy.helm.render`, from the repository's root.

That is the names of settings in values.schema.json and, with helm-python-sdk (Helm's own code), what the chart renders
with each of deploy/helm/values, into deploy/helm/rendered. Tests compare both.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import yaml

from server.settings import Settings

FOLDER = Path(__file__).resolve().parent
CHART = FOLDER / "trellis"
SCHEMA = CHART / "values.schema.json"
# fmt: off
OWNED = frozenset((
    "API_KEYS", "CACHE_DIR", "DISAGGREGATION_MODE", "ENCODE_URLS", "ENGINE", "ENGINE_ADDRESS", "EXTRA_ENGINE_ARGS",
    "GPUS_PER_NODE", "HOST", "INTERNAL_SECRET", "KV_DISK_CACHE_DIR", "KV_DISK_CACHE_MB", "KV_EVENTS_ENDPOINT",
    "KV_EVENTS_REPLAY_ENDPOINT", "KV_EVENTS_TOPIC", "KV_HOST_CACHE_MB", "MODEL", "OPEN_PROBES", "PORT",
    "PREFILL_URLS", "PUBLISH_KV_EVENTS", "ROUTE_EVENTS", "ROUTE_EVENTS_PORT", "ROUTE_REPLAYS", "ROUTE_REPLAY_PORT",
    "ROUTE_URLS", "SERVED_MODEL_NAME", "SHUTDOWN_GRACE_SECONDS",
))
# fmt: on
"""Settings that the chart decides: the kubelet probes without a key, and pods have their own addresses and folders."""
RELEASE = "trellis"
NAMESPACE = "default"


def render(values: dict[str, Any]) -> str:
    """Return the manifests of a release with these values, the files of the chart in order."""
    import helm_python as helm  # noqa: PLC0415 - the examples are read without it

    with helm.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=RELEASE, namespace=NAMESPACE)
    documents = [
        document.strip()
        for path, text in sorted(files.items())
        if path.endswith(".yaml")
        for document in text.split("\n---\n")
    ]
    texts = ["\n".join(line.rstrip() for line in document.splitlines()) for document in documents]
    return "".join(f"---\n{text.removeprefix('---').strip()}\n" for text in texts if text.strip("- \n"))


def examples() -> dict[str, dict[str, Any]]:
    """Return the values of each example by its name."""
    return {path.stem: yaml.safe_load(path.read_text()) for path in sorted((FOLDER / "values").glob("*.yaml"))}


def known_settings() -> list[str]:
    """Return the settings that values may have, as variables."""
    return sorted({name.upper() for name in Settings.model_fields} - OWNED)


def main() -> None:
    schema = json.loads(SCHEMA.read_text())
    schema["definitions"]["settings"]["propertyNames"]["enum"] = known_settings()
    SCHEMA.write_text(json.dumps(schema, indent=2) + "\n")
    if importlib.util.find_spec("helm_python") is None:
        raise SystemExit("the examples were not rendered: pip install helm-python-sdk")
    for name, values in examples().items():
        (FOLDER / "rendered" / f"{name}.yaml").write_text(f"# {name}.yaml, rendered by render.py\n{render(values)}")


if __name__ == "__main__":
    main()
