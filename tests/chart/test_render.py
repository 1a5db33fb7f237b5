"""What the chart renders: valid for every supported Kubernetes, and the pod that is promised."""

import functools
import importlib.resources
import json
import sys

import pytest
from charts import CHART, DEMO, only

MINORS = range(28, 38)
OPERATOR = ("monitoring.coreos.com/v1",)


def appliance(manifests: list) -> dict:
    return only(manifests, "Deployment")["spec"]["template"]["spec"]


def test_lint_is_strictly_clean(helm):
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="session")
def validate(tools):
    # It asks for the backport of what Python 3.11 has.
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setitem(sys.modules, "importlib_resources", importlib.resources)
    monkeypatch.syspath_prepend(str(tools))
    import kubernetes_validate
    from kubernetes_validate import utils

    monkeypatch.setattr(utils, "schema_contents", functools.cache(utils.schema_contents))

    def check(manifests: list, version: str) -> None:
        for manifest in manifests:
            if not manifest["apiVersion"].startswith("monitoring.coreos.com"):
                kubernetes_validate.validate(manifest, version, strict=True)

    yield check
    monkeypatch.undo()


@pytest.mark.parametrize("minor", MINORS)
@pytest.mark.parametrize("values", [(), DEMO, ("hugePages.size=2Mi", "hugePages.amountGiB=64")],
                         ids=["gpu", "demo", "huge pages"])  # fmt: skip
def test_every_manifest_is_valid_for_this_kubernetes(helm, validate, minor, values):
    # policy/v1 is what all of them have; `helm template` knows no cluster's list.
    manifests = helm.render(*values, kubernetes=f"1.{minor}.0", apis=("policy/v1",))
    validate(manifests, f"1.{minor}")


def test_a_store_on_the_node_may_have_any_name(helm):
    values = ("store.type=hostPath", r"store.hostPath=/srv/models\, 3 bits: {a}")
    spec = only(helm.render(*values), "Deployment")["spec"]["template"]["spec"]
    (models,) = (volume for volume in spec["volumes"] if volume["name"] == "models")
    assert models["hostPath"]["path"] == "/srv/models, 3 bits: {a}"


def test_only_one_pod_is_ever_asked_for_the_gpus(helm):
    deployment = only(helm.render(), "Deployment")["spec"]
    assert deployment["replicas"] == 1 and deployment["strategy"] == {"type": "Recreate"}


def test_the_pod_gets_its_gpus_cpus_and_memory_for_good(helm):
    resources = appliance(helm.render())["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"] == {"cpu": "16", "memory": "256Gi", "nvidia.com/gpu": "2"}


def test_huge_pages_are_asked_for_and_mounted(helm):
    pod = appliance(helm.render("hugePages.size=2Mi", "hugePages.amountGiB=64"))
    assert pod["containers"][0]["resources"]["limits"]["hugepages-2Mi"] == "64Gi"
    assert {"name": "huge-pages", "emptyDir": {"medium": "HugePages-2Mi"}} in pod["volumes"]


def test_the_container_may_do_next_to_nothing(helm):
    pod = appliance(helm.render())
    security = pod["containers"][0]["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"], "add": ["SYS_NICE"]}
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]


def test_pinning_as_root_adds_only_what_it_needs(helm):
    pod = appliance(helm.render("memlock=root"))
    assert pod["securityContext"]["runAsUser"] == 0
    added = pod["containers"][0]["securityContext"]["capabilities"]["add"]
    assert added == ["SYS_NICE", "IPC_LOCK", "DAC_OVERRIDE"]


@pytest.mark.parametrize(("load", "tries"), [(60, 30), (600, 180), (3600, 1080)])
def test_the_start_may_take_three_times_the_predicted_load(helm, load, tries):
    probe = appliance(helm.render(f"loadSeconds={load}"))["containers"][0]["startupProbe"]
    assert probe["failureThreshold"] == tries and probe["periodSeconds"] == 10


def test_probes_ask_the_agent_and_never_the_engine(helm):
    container = appliance(helm.render())["containers"][0]
    asked = {name: container[name]["httpGet"] for name in
             ("startupProbe", "readinessProbe", "livenessProbe")}  # fmt: skip
    assert {probe["port"] for probe in asked.values()} == {"agent"}
    assert [probe["path"] for probe in asked.values()] == ["/startz", "/readyz", "/livez"]


def test_the_grace_period_covers_the_drain(helm):
    pod = appliance(helm.render("settings.drainSeconds=90"))
    assert pod["terminationGracePeriodSeconds"] >= 120
    assert pod["containers"][0]["lifecycle"]["preStop"]


def test_no_key_is_in_the_pod_only_the_name_of_its_file(helm):
    manifests = helm.render()
    secret = only(manifests, "Secret")["data"]["api_keys"]
    rest = [m for m in manifests if m["kind"] != "Secret"]
    assert secret not in json.dumps(rest)
    values = {e["name"]: e["value"] for e in appliance(manifests)["containers"][0]["env"]}
    assert values["APPLIANCE_GATEWAY_KEYS"] == "/run/secrets/api_keys"


def test_a_bad_node_blocks_an_install_but_not_an_upgrade(helm):
    job = only(helm.render(), "Job")
    assert job["metadata"]["annotations"]["helm.sh/hook"] == "pre-install"
    container = job["spec"]["template"]["spec"]["containers"][0]
    assert container["args"] == ["--until", "preflight"] and job["spec"]["backoffLimit"] == 0
    held = {e["name"]: e["value"] for e in container["env"]}["APPLIANCE_HOLD_ON_FAILURE"]
    assert held == "false", "a hook that is held blocks the install for nothing"
    asked = container["resources"]["limits"]
    assert asked["nvidia.com/gpu"] == "2", "it must see the GPUs that it judges"


def test_nobody_reaches_it_from_other_namespaces_and_it_reaches_nobody(helm):
    policy = only(helm.render(), "NetworkPolicy")["spec"]
    assert policy["egress"] == [] and policy["policyTypes"] == ["Ingress", "Egress"]
    assert [rule["from"] for rule in policy["ingress"]] == [[{"podSelector": {}}]] * 2


@pytest.mark.parametrize(("apis", "version"), [(("policy/v1",), "policy/v1"),
                                               ((), "policy/v1beta1")])  # fmt: skip
def test_the_disruption_budget_is_of_a_version_that_the_cluster_has(helm, apis, version):
    kubernetes = "1.37.0" if apis else "1.20.2"
    found = only(helm.render(kubernetes=kubernetes, apis=apis), "PodDisruptionBudget")
    assert found["apiVersion"] == version and found["spec"]["maxUnavailable"] == 0


def test_monitoring_is_there_when_asked_for(helm):
    flags = ("monitoring.serviceMonitor=true", "monitoring.rules=true", "monitoring.dashboard=true")
    manifests = helm.render(*flags, apis=OPERATOR)
    assert only(manifests, "ServiceMonitor")["spec"]["endpoints"][0]["path"] == "/metrics"
    assert only(manifests, "PrometheusRule")["spec"]["groups"]
    dashboard = json.loads(only(manifests, "ConfigMap")["data"]["appliance.json"])
    assert dashboard["panels"]
    assert not [m for m in helm.render() if m["kind"] in ("ServiceMonitor", "ConfigMap")]


def test_the_notes_say_the_next_command(helm):
    done = helm("install", "a", str(CHART), "--dry-run=client", "--namespace", "ns")
    notes = done.stdout.partition("NOTES:")[2]
    assert "helm -n ns test a" in notes and "rollout status" in notes
