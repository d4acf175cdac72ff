"""Render the chart with each of deploy/helm/values into deploy/helm/rendered: `python deploy/helm/render.py`.

Needs helm-python-sdk (`pip install helm-python-sdk`), which is Helm's own code. A test compares the files with what the
chart renders.
"""

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).resolve().parent
CHART = FOLDER / "trellis"
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


if __name__ == "__main__":
    for name, values in examples().items():
        (FOLDER / "rendered" / f"{name}.yaml").write_text(f"# {name}.yaml, rendered by render.py\n{render(values)}")
