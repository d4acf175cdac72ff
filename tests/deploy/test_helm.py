"""The Helm chart: what it renders is kept, valid, confined and consistent; what cannot work is refused.

The rendered examples are read without Helm. Tests of rendering itself need helm-python-sdk (Helm's own code), and those
of built-in kinds kubernetes-validate: they are skipped without.
"""

import copy
import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest
import yaml

from deploy.helm.render import CHART, FOLDER, NAMESPACE, OWNED, RELEASE, SCHEMA, examples, known_settings, render
from server.http.middleware import PROBES
from server.http.routes import INTERNAL
from server.roles import missing_setting
from server.settings import Settings
from tests.server.metrics.test_page import page_of, samples
from tests.support.servers import ROOT

EXAMPLES = examples()
RENDERED: dict[str, list[dict[str, Any]]] = {
    name: list(yaml.safe_load_all((FOLDER / "rendered" / f"{name}.yaml").read_text())) for name in EXAMPLES
}
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
CRDS = yaml.safe_load((ROOT / "tests/deploy/crds.yaml").read_text())
KUBERNETES = ("1.30", "1.37")
"""The oldest version that the chart names, and the newest that kubernetes-validate knows."""


def of_kind(name: str, *kinds: str) -> list[dict[str, Any]]:
    return [document for document in RENDERED[name] if document["kind"] in kinds]


def templates(document: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of pods in a workload, the serving one first."""
    if document["kind"] == "Deployment":
        return [document["spec"]["template"]]
    group = document["spec"]["leaderWorkerTemplate"]
    return [group["leaderTemplate"], group["workerTemplate"]]


def workloads() -> Iterator[tuple[str, dict[str, Any]]]:
    """The replicas of all examples, with the names of these."""
    for name in EXAMPLES:
        for document in of_kind(name, "Deployment", "LeaderWorkerSet"):
            if document["metadata"]["labels"]["app.kubernetes.io/component"] != "planner":
                yield name, document


def variables(template: dict[str, Any]) -> dict[str, str]:
    """The variables of a container that are written in its template."""
    return {entry["name"]: entry["value"] for entry in template["spec"]["containers"][0]["env"] if "value" in entry}


def selects(selector: dict[str, str], template: dict[str, Any]) -> bool:
    """Whether labels select the pods of a template; LeaderWorkerSet itself labels the leader."""
    return (
        selector.items() <= {**template["metadata"]["labels"], "leaderworkerset.sigs.k8s.io/worker-index": "0"}.items()
    )


def test_each_role_and_each_way_to_run_it_has_an_example() -> None:
    roles = {document["metadata"]["labels"]["app.kubernetes.io/component"] for _, document in workloads()}
    assert roles == DEFAULTS["roles"].keys() == {"aggregated", "prefill", "decode", "encode", "router"}
    kinds = {document["kind"] for documents in RENDERED.values() for document in documents}
    assert kinds >= CRDS.keys() | {"Deployment", "HorizontalPodAutoscaler", "NetworkPolicy", "PodDisruptionBudget"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_custom_resources_have_the_fields_of_their_definitions(name: str) -> None:
    for document in of_kind(name, *CRDS):
        definition = CRDS[document["kind"]]
        assert document["apiVersion"] == definition["apiVersion"]
        jsonschema.Draft202012Validator(definition["spec"]).validate(document["spec"])


@pytest.mark.parametrize("name", EXAMPLES)
def test_other_resources_are_strictly_valid(name: str) -> None:
    kubernetes = pytest.importorskip("kubernetes_validate")
    documents = [document for document in RENDERED[name] if document["kind"] not in CRDS]
    for document in of_kind(name, "LeaderWorkerSet"):
        documents += [{"apiVersion": "v1", "kind": "Pod", **template} for template in templates(document)]
    oldest, newest = KUBERNETES
    for document in {document["kind"]: document for document in documents}.values():
        kubernetes.validate(document, oldest, strict=True)
    for document in documents:
        kubernetes.validate(document, newest, strict=True)
    wrong = copy.deepcopy(documents[-1])
    wrong["spec"]["unknown"] = True
    with pytest.raises(kubernetes.ValidationError):
        kubernetes.validate(wrong, newest, strict=True)


def test_every_pod_is_confined() -> None:
    for name, document in workloads():
        for template in templates(document):
            spec, (container,) = template["spec"], template["spec"]["containers"]
            assert spec["securityContext"]["runAsNonRoot"] and spec["securityContext"]["runAsUser"] == 10001, name
            assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
            is_trtllm = variables(template).get("ENGINE") == "trtllm"
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": not is_trtllm,  # as in compose.yaml
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["memory"]
            volumes = {volume["name"]: volume for volume in spec["volumes"]}
            mounted = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
            assert len(mounted) == len(volumes)
            assert (
                mounted["/dev/shm"]["emptyDir"]["medium"] == "Memory" and mounted["/dev/shm"]["emptyDir"]["sizeLimit"]
            )
            for setting in ("CACHE_DIR", "HF_HOME", "KV_DISK_CACHE_DIR", "EXTRA_ENGINE_ARGS"):
                path = variables(template).get(setting, "/tmp")
                assert any(path.startswith(place) for place in mounted), f"{name}: {setting} lies on the root"


def test_every_pod_has_settings_that_start_it() -> None:
    """No unknown names, nothing missing, secrets by reference alone, and an internal secret where it is needed."""
    for name, document in workloads():
        template = templates(document)[0]
        given = variables(template)
        assert given.keys() - {"HF_HOME"} <= {setting.upper() for setting in Settings.model_fields}, name
        role = document["metadata"]["labels"]["app.kubernetes.io/component"]
        needs_secret = any(one["kind"] == "Secret" for one in RENDERED[name]) or role != "aggregated"
        values = {setting.lower(): value for setting, value in given.items() if setting != "HF_HOME"}
        settings = Settings(**values, internal_secret="s" if needs_secret else None)
        assert missing_setting(settings) is None and settings.disaggregation_mode == role
        secrets = {
            entry["name"]: entry["valueFrom"]["secretKeyRef"]
            for entry in template["spec"]["containers"][0]["env"]
            if "secretKeyRef" in entry.get("valueFrom", {})
        }
        assert secrets.keys() == {"API_KEYS", "HF_TOKEN", "INTERNAL_SECRET"}
        assert secrets["INTERNAL_SECRET"]["optional"] == (role in ("aggregated", "router"))


def test_probes_ask_routes_that_are_open_and_the_grace_is_the_drain_time() -> None:
    for name, document in workloads():
        for part, template in enumerate(templates(document)):
            (container,) = template["spec"]["containers"]
            given = variables(template)
            grace, stop = template["spec"]["terminationGracePeriodSeconds"], container["lifecycle"]["preStop"]
            left = stop["sleep"]["seconds"] if "sleep" in stop else int(stop["exec"]["command"][-1])
            rest = 35 if given.get("ENGINE") == "trtllm" or "multinode" in name or name == "disaggregated" else 10
            assert grace == left + int(given["SHUTDOWN_GRACE_SECONDS"]) + rest, "processes take a while to end"
            if part:
                continue  # a worker's has no HTTP
            probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
            assert {probe["httpGet"]["path"] for probe in probes.values()} <= PROBES
            assert all(probe["httpGet"]["port"] == "http" for probe in probes.values())
            assert probes["readiness"]["httpGet"]["path"] == "/health/ready"
            assert probes["liveness"]["httpGet"]["path"] == "/health/live", "a loading engine is no reason to restart"
            is_router = given["DISAGGREGATION_MODE"] == "router"
            assert probes["startup"]["httpGet"]["path"] == ("/health/live" if is_router else "/health/ready")
            allowed = probes["startup"]["periodSeconds"] * probes["startup"]["failureThreshold"]
            assert allowed == 120 if is_router else allowed >= 1800
            if document["kind"] == "Deployment":
                assert document["spec"]["progressDeadlineSeconds"] > allowed, "loading is progress"


def test_replicas_find_each_other_by_services_that_select_them() -> None:
    urls = ("PREFILL_URLS", "ENCODE_URLS", "ROUTE_URLS")
    asked = 0
    for name, document in workloads():
        services = {service["metadata"]["name"]: service["spec"] for service in of_kind(name, "Service")}
        assert RELEASE in services, "what clients reach"
        for setting in urls:
            if not (url := variables(templates(document)[0]).get(setting)):
                continue
            asked += 1
            host, port = re.fullmatch(r"dns\+http://([a-z-]+):(\d+)", url).groups()  # type: ignore[union-attr]
            service = services[host]
            assert service["clusterIP"] == "None" and [int(port)] == [one["port"] for one in service["ports"]]
            (found,) = [
                other
                for other in of_kind(name, "Deployment", "LeaderWorkerSet")
                if selects(service["selector"], templates(other)[0])
            ]
            role = found["metadata"]["labels"]["app.kubernetes.io/component"]
            assert role == {"PREFILL_URLS": "prefill", "ENCODE_URLS": "encode", "ROUTE_URLS": "aggregated"}[setting]
            (http,) = [port for port in templates(found)[0]["spec"]["containers"][0]["ports"] if port["name"] == "http"]
            assert http["containerPort"] == int(variables(templates(found)[0])["PORT"])
        clashes = {one["metadata"]["name"] for one in of_kind(name, "LeaderWorkerSet")} & services.keys()
        assert not clashes, "a LeaderWorkerSet makes a service of its name"
    assert asked >= 4


def test_internal_replicas_are_reached_by_peers_alone() -> None:
    """A policy selects every pod. Behind the entrance only replicas of the release and scrapers come in."""
    assert {"/prefill", "/encode"} <= INTERNAL
    for name, document in workloads():
        (policy,) = [
            one["spec"]
            for one in of_kind(name, "NetworkPolicy")
            if selects(one["spec"]["podSelector"]["matchLabels"], templates(document)[0])
        ]
        assert policy["policyTypes"] == ["Ingress"]
        peers, monitoring, *others = policy["ingress"]
        release = {"app.kubernetes.io/name": "trellis", "app.kubernetes.io/instance": RELEASE}
        assert peers == {"from": [{"podSelector": {"matchLabels": release}}]}
        assert monitoring["ports"] == [{"port": 8000}] and "namespaceSelector" in monitoring["from"][0]
        (entrance,) = [one for one in of_kind(name, "Service") if one["metadata"]["name"] == RELEASE]
        is_entrance = selects(entrance["spec"]["selector"], templates(document)[0])
        assert bool(others) == is_entrance, f"{name}: {document['metadata']['name']}"
        if name == "gateway":
            clients, picker = others
            assert "namespaceSelector" in clients["from"][0] and clients["ports"] == [{"port": 8000}]
            assert picker["ports"][1] == {"port": 5557, "endPort": 5756}


def test_disruptions_scaling_and_workloads_name_the_same_things() -> None:
    for name in EXAMPLES:
        workers = {
            (one["kind"], one["metadata"]["name"]): one for one in of_kind(name, "Deployment", "LeaderWorkerSet")
        }
        scaled = set()
        for one in of_kind(name, "ScaledObject", "HorizontalPodAutoscaler"):
            target = one["spec"]["scaleTargetRef"]
            workload = workers[target["kind"], target["name"]]
            assert target["apiVersion"] == workload["apiVersion"]
            scaled.add(target["name"])
        scaled |= {arguments["kubernetes"].partition("/")[2] for arguments in map(planned, planners(name))}
        for (_, called), workload in workers.items():
            assert ("replicas" in workload["spec"]) == (called not in scaled), "an upgrade would undo what is scaled"
        for budget in of_kind(name, "PodDisruptionBudget"):
            labels = budget["spec"]["selector"]["matchLabels"]
            (template,) = [one for one in workers.values() if selects(labels, templates(one)[0])]
            assert budget["metadata"]["name"] == template["metadata"]["name"]


def planners(name: str) -> list[dict[str, Any]]:
    return [
        one
        for one in of_kind(name, "Deployment")
        if one["metadata"]["labels"]["app.kubernetes.io/component"] == "planner"
    ]


def planned(planner: dict[str, Any]) -> dict[str, str]:
    """The flags of a planner, by name; of several the last."""
    command, *flags = planner["spec"]["template"]["spec"]["containers"][0]["args"]
    assert command == "plan"
    return dict(flag.removeprefix("--").split("=", 1) for flag in flags)


def test_a_planner_may_scale_its_role_and_nothing_else() -> None:
    (planner,) = planners("router")
    assert (
        planned(planner)["role"] == "aggregated" and planned(planner)["kubernetes"] == "deployments/trellis-aggregated"
    )
    (role,), (binding,) = of_kind("router", "Role"), of_kind("router", "RoleBinding")
    assert role["rules"] == [
        {
            "apiGroups": ["apps"],
            "resources": ["deployments/scale"],
            "resourceNames": ["trellis-aggregated"],
            "verbs": ["get", "patch"],
        },
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]},
    ]
    spec = planner["spec"]["template"]["spec"]
    (account,) = of_kind("router", "ServiceAccount")
    assert spec["serviceAccountName"] == binding["subjects"][0]["name"] == account["metadata"]["name"]
    assert (
        spec["securityContext"]["runAsNonRoot"] and spec["containers"][0]["securityContext"]["readOnlyRootFilesystem"]
    )
    (policy,) = [one for one in of_kind("router", "NetworkPolicy") if one["metadata"]["name"] == "trellis-aggregated"]
    peers = policy["spec"]["ingress"][0]["from"][0]["podSelector"]["matchLabels"]
    assert peers.items() <= planner["spec"]["template"]["metadata"]["labels"].items(), "it asks pods for their metrics"
    plan = pytest.importorskip("server.commands.plan")
    flags = planner["spec"]["template"]["spec"]["containers"][0]["args"][1:]
    found = plan.parser().parse(flags)
    assert (found.role, found.min, found.max) == ("aggregated", 4, 8) and dict(found.metric)[
        "trtllm_kv_cache_utilization"
    ] == 0.8


async def test_scaling_goes_by_metrics_that_the_role_has() -> None:
    wanted: dict[str, set[str]] = {
        role: {*config["autoscaling"].get("metrics", ())} for role, config in DEFAULTS["roles"].items()
    }
    for name in EXAMPLES:
        for one in of_kind(name, "ScaledObject"):
            role = one["metadata"]["labels"]["app.kubernetes.io/component"]
            for trigger in one["spec"]["triggers"]:
                query = trigger["metadata"]["query"]
                metric, labels = re.fullmatch(r"sum\((\w+)\{(.*)\}\)", query).groups()  # type: ignore[union-attr]
                assert f'app_kubernetes_io_component="{role}"' in labels and f'namespace="{NAMESPACE}"' in labels
                assert metric in wanted[role]
    assert wanted.pop("router") == set() and DEFAULTS["roles"]["router"]["autoscaling"]["cpuUtilization"]
    for role, metrics in wanted.items():
        assert metrics and metrics <= {sample.name for sample in samples(await page_of(role))}, role


def test_the_schema_knows_every_setting_but_those_of_the_chart() -> None:
    """A typing error in `settings` fails before anything is installed."""
    assert {setting.lower() for setting in OWNED} < Settings.model_fields.keys()
    names = json.loads(SCHEMA.read_text())["definitions"]["settings"]["propertyNames"]["enum"]
    assert names == known_settings(), "run: python -m deploy.helm.render"


def test_kubernetes_page_names_what_is_there() -> None:
    page = (ROOT / "docs/kubernetes.md").read_text()
    for path in re.findall(r"`?(deploy/helm/[\w./-]+)`?", page):
        assert (ROOT / path.rstrip(".")).exists(), path
    for name in EXAMPLES:
        assert f"{name}.yaml" in page


# With Helm's own code


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_rendered_examples_are_what_the_chart_renders(name: str) -> None:
    pytest.importorskip("helm_python")
    text = (FOLDER / "rendered" / f"{name}.yaml").read_text()
    assert text.partition("\n")[2] == render(EXAMPLES[name]), "run: python -m deploy.helm.render"


def test_helm_has_nothing_to_say_of_the_chart() -> None:
    helm = pytest.importorskip("helm_python")
    for values in ({}, *EXAMPLES.values()):
        found = helm.lint(str(CHART), values, strict=True, quiet=True)
        assert not [one for one in found["messages"] if "icon is recommended" not in str(one)], found


def changed(name: str, path: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(EXAMPLES[name])
    *folders, last = path.split(".")
    place = values
    for folder in folders:
        place = place.setdefault(folder, {})
    place[last] = value
    return values


@pytest.mark.parametrize(
    ("name", "path", "value", "message"),
    [
        ("laptop", "repicas", 2, "repicas"),
        ("laptop", "roles.worker", {}, "worker"),
        ("laptop", "roles.aggregated.replica", 2, "replica"),
        ("laptop", "settings.MAX_BATCHSIZE", 8, "MAX_BATCHSIZE"),
        ("laptop", "settings.PORT", 80, "PORT"),
        ("laptop", "settings.OPEN_PROBES", False, "OPEN_PROBES"),
        ("laptop", "engine", "vllm", "engine"),
        ("laptop", "roles.aggregated.enabled", False, "oneOf"),
        ("laptop", "roles.prefill.enabled", True, "roles"),
        ("laptop", "roles.aggregated.nodes", 2, "engine"),
        ("laptop", "roles.aggregated.kvCache", {"diskMb": 10}, "hostMb"),
        ("laptop", "inferencePool.enabled", True, "name"),
        ("laptop", "httpRoute.enabled", True, "parentRefs"),
        ("laptop", "roles.aggregated.strategy", {"maxSurge": 0, "maxUnavailable": 0}, "cannot both be 0"),
        ("laptop", "roles.aggregated.autoscaling", {"enabled": True, "minReplicas": 9}, "larger than maxReplicas"),
        ("laptop", "roles.encode", {"enabled": True}, "secret"),
        ("router", "roles.router.autoscaling", {"enabled": True, "kind": "planner"}, "goes by metrics"),
        ("encode", "roles.decode.enabled", False, "decode"),
        ("encode", "roles.aggregated.enabled", True, "oneOf"),
        ("encode", "roles.encode.nodes", 2, "nodes"),
        ("router", "inferencePool", {"enabled": True, "picker": {"name": "p"}}, "router"),
        ("multinode", "multinode.sshSecret", "", "sshSecret"),
        ("disaggregated", "roles.decode.gpus", 0, "needs a GPU"),
        ("disaggregated", "roles.decode.kvCache", {"hostMb": 10, "diskMb": 10}, "engine"),
        ("aggregated", "models.existingClaim", "models", "models"),
    ],
)
def test_impossible_values_are_refused_by_name(name: str, path: str, value: Any, message: str) -> None:
    helm = pytest.importorskip("helm_python")
    with pytest.raises(helm.HelmError) as refused:
        render(changed(name, path, value))
    assert message in str(refused.value)


def rendered(name: str, path: str, value: Any) -> list[dict[str, Any]]:
    pytest.importorskip("helm_python")
    return list(yaml.safe_load_all(render(changed(name, path, value))))


def test_grafana_and_prometheus_get_the_shipped_files() -> None:
    documents = rendered("aggregated", "monitoring", {"enabled": True, "dashboard": True})
    (dashboard,) = [one for one in documents if one["metadata"]["name"] == "trellis-dashboard"]
    shipped = json.loads((ROOT / "deploy/observability/grafana/trellis.json").read_text())
    assert json.loads(dashboard["data"]["trellis.json"]) == shipped
    (rules,) = [one for one in documents if one["kind"] == "PrometheusRule"]
    assert rules["spec"] == yaml.safe_load((ROOT / "deploy/observability/alerts.yml").read_text())
    (monitor,) = [one for one in documents if one["kind"] == "PodMonitor"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert {"targetLabel": "job", "replacement": "trellis"} in endpoint["relabelings"], "alerts know replicas by it"


def test_values_reach_the_server_as_they_are_written() -> None:
    """Helm reads numbers as floating-point ones, and would write 64000000 as 6.4e+07."""
    given = {"MAX_IMAGE_PIXELS": 64000000, "LEASE_SECONDS": 2.5, "ACCESS_LOG": True, "MAX_NUM_TOKENS": 1000000}
    (workload,) = [one for one in rendered("laptop", "settings", given) if one["kind"] == "Deployment"]
    found = variables(templates(workload)[0])
    assert given.items() == {name: yaml.safe_load(found[name]) for name in given}.items()
    settings = Settings(**{name.lower(): found[name] for name in given})
    assert (settings.max_image_pixels, settings.access_log) == (64000000, True)


def test_tensor_parallelism_takes_all_gpus_unless_something_else_is_said() -> None:
    for config, size in (
        ({"engineConfig": ""}, "4"),
        ({"engineConfig": "a: 1"}, None),
        ({"engineConfig": "", "settings": {"TENSOR_PARALLEL_SIZE": 2}}, "2"),
    ):
        values = changed("disaggregated", "roles.decode", {"enabled": True, **config})
        documents = yaml.safe_load_all(render(values)) if pytest.importorskip("helm_python") else ()
        (decode,) = [
            one for one in documents if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("decode")
        ]
        assert variables(templates(decode)[0]).get("TENSOR_PARALLEL_SIZE") == size


def test_an_autoscaler_of_kubernetes_goes_by_the_same_metrics() -> None:
    documents = rendered("aggregated", "roles.aggregated.autoscaling", {"enabled": True, "kind": "hpa"})
    (scaler,) = [one for one in documents if one["kind"] == "HorizontalPodAutoscaler"]
    targets = {
        one["pods"]["metric"]["name"]: one["pods"]["target"]["averageValue"] for one in scaler["spec"]["metrics"]
    }
    assert targets == {"trtllm_kv_cache_utilization": "800m", "trtllm_num_requests_waiting": "4000m"}
    assert not [one for one in documents if one["kind"] == "ScaledObject"]
    pytest.importorskip("kubernetes_validate").validate(scaler, KUBERNETES[-1], strict=True)


def test_something_else_may_set_the_replicas() -> None:
    documents = rendered("aggregated", "roles.aggregated.autoscaling", {"enabled": True, "kind": "external"})
    assert not [one for one in documents if one["kind"] in ("ScaledObject", "HorizontalPodAutoscaler")]
    (workload,) = [one for one in documents if one["kind"] == "Deployment"]
    assert "replicas" not in workload["spec"], "an upgrade would undo what was set"
