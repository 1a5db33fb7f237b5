"""What the cluster's objects say becomes a state, a reason and the value to set."""

import pytest

from appliance.errors import ServeError, UsageError
from appliance.serve.kubernetes import Release, _sentence, scale, verdict
from appliance.serve.pods import explain, explain_install, once_pod, refusal

RELEASE = Release("flash", "serving")


def deployment(replicas: int = 1, **status) -> dict:
    return {"spec": {"replicas": replicas}, "status": status}


def pod(conditions=(), container=None, name="a", created="2026-11-29T10:00:00Z", **metadata):
    return {
        "metadata": {"name": name, "creationTimestamp": created, **metadata},
        "spec": {"nodeName": "node-1"},
        "status": {"conditions": list(conditions), "containerStatuses": [container or {}]},
    }


def unscheduled(message: str) -> dict:
    return {
        "type": "PodScheduled",
        "status": "False",
        "reason": "Unschedulable",
        "message": message,
    }


@pytest.mark.parametrize(
    ("message", "fix"),
    [
        ("0/3 nodes are available: 3 Insufficient nvidia.com/gpu.", "gpus.count"),
        ("0/1 nodes are available: 1 node(s) had untolerated taint {x: y}.", "tolerations"),
        ("0/1 nodes are available: 1 Insufficient memory.", "resources.memoryGiB"),
        ("0/1 nodes are available: 1 Insufficient hugepages-1Gi.", "hugePages.size"),
        ("0/1 nodes are available: 1 Insufficient cpu.", "resources.cpu"),
        ("pod has unbound immediate PersistentVolumeClaims", "kubectl describe pvc"),
    ],
)
def test_a_pending_pod_gives_the_schedulers_reason_and_the_value_to_set(message, fix):
    found = explain(deployment(), [pod([unscheduled(message)])], [])
    assert found.state == "pending" and message in found.reason and fix in found.fix


def test_a_quota_is_named_where_no_pod_could_be_made():
    message = 'pods "a" is forbidden: exceeded quota: gpus, requested: nvidia.com/gpu=2'
    failure = {"type": "ReplicaFailure", "status": "True", "message": message}
    found = explain(deployment(conditions=[failure]), [], [{"message": message}])
    assert found.state == "pending" and message in found.reason and "ResourceQuota" in found.fix


def test_an_image_that_cannot_be_pulled_is_a_failure_with_the_values_to_set():
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "not found"}}
    found = explain(deployment(), [pod(container={"state": waiting})], [])
    assert found.state == "failed" and "not found" in found.reason
    assert "image.digest" in found.fix


def test_a_crash_loop_says_how_often_and_with_which_exit_code():
    container = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}, "restartCount": 4,
                 "lastState": {"terminated": {"exitCode": 7}}}  # fmt: skip
    found = explain(deployment(), [pod(container=container)], [])
    assert found.state == "failed" and found.restarts == 4
    assert found.reason == "it ended 4 times, last with exit code 7"


def test_a_ready_pod_names_its_node_and_the_digest_that_runs():
    container = {"ready": True, "state": {"running": {}}, "imageID": "r.example/a@sha256:abc"}
    found = explain(deployment(), [pod(container=container)], [])
    assert (found.state, found.node, found.image_digest) == ("ready", "node-1", "sha256:abc")


def test_a_pod_that_is_going_is_not_the_one_that_counts():
    going = pod(name="old", created="2026-11-29T12:00:00Z", deletionTimestamp="x",
                container={"ready": True})  # fmt: skip
    found = explain(
        deployment(), [going, pod(name="new", container={"state": {"running": {}}})], []
    )
    assert (found.pod, found.state) == ("new", "starting")


def test_a_pod_that_the_node_does_not_take_says_what_is_short_there():
    message = "Pod Node didn't have enough resource: cpu, requested: 1000, used: 16000"
    full = {"spec": {"nodeName": "gpu-7"}, "status": {"phase": "Failed", "message": message}}
    assert refusal(full) == f"the node gpu-7 does not take the pod: {message}"
    ran = {**full, "status": {**full["status"], "containerStatuses": [{"restartCount": 0}]}}
    assert refusal(ran) is None


def test_a_look_into_an_image_needs_no_whole_cpu_of_a_node_that_has_given_all_away():
    container = {"volumeMounts": [], "securityContext": {}}
    template = {"spec": {"containers": [container], "volumes": []}}
    made = once_pod(template, "once", "r/a:2", ["appliance"], node="gpu-7", state=False)
    assert made["spec"]["containers"][0]["resources"]["requests"]["cpu"] == "100m"


def test_scaled_to_nothing_is_stopped():
    assert explain(deployment(replicas=0), [], []).state == "stopped"


def test_more_than_one_replica_is_refused_before_the_cluster_is_asked():
    with pytest.raises(UsageError, match="2 replicas: there is one appliance, or none"):
        scale(RELEASE, 2)


@pytest.mark.parametrize("status", [401, 403])
def test_no_rights_is_one_sentence_with_the_rights_to_ask_for(status):
    error = _sentence(status, "Forbidden", RELEASE)
    assert isinstance(error, ServeError)
    assert "namespace serving" in error.message and "pods/log" in error.fix


class Session:
    """The kubernetes client's websocket: what its `returncode` does when no status came."""

    def __init__(self, *, status: dict | None, is_open: bool = False) -> None:
        self.status, self.open, self.closed = status, is_open, False

    def run_forever(self, timeout: float) -> None:
        pass

    @property
    def returncode(self) -> int | None:
        if self.open:
            return None
        if self.status["status"] == "Success":
            return 0
        return int(self.status["details"]["causes"][0]["message"])

    def close(self) -> None:
        self.closed = True

    def read_all(self) -> str:
        return "said"


def test_a_command_that_ends_gives_its_code_and_its_words():
    failed = {"status": "Failure", "details": {"causes": [{"message": "3"}]}}
    assert verdict(Session(status=failed), ["appliance", "drain"], 5.0) == (3, "said")
    assert verdict(Session(status={"status": "Success"}), ["appliance"], 5.0) == (0, "said")


@pytest.mark.parametrize("status", [None, {"status": "Failure", "message": "container is gone"}])
def test_a_container_that_goes_while_a_command_runs_in_it_is_a_sentence(status):
    with pytest.raises(ServeError, match="appliance health: the container was gone before"):
        verdict(Session(status=status), ["appliance", "health"], 5.0)


def test_a_command_that_takes_too_long_is_let_go_with_the_limit():
    session = Session(status=None, is_open=True)
    with pytest.raises(ServeError, match="appliance drain did not end within 5 s"):
        verdict(session, ["appliance", "drain"], 5.0)
    assert session.closed


def checking(phase: str, **status) -> dict:
    return {
        "metadata": {"name": "flash-moe-appliance-preflight-x1", "creationTimestamp": "2026"},
        "spec": {"nodeName": "n"},
        "status": {"phase": phase, **status},
    }


def test_an_install_that_its_preflight_stopped_says_which_check_and_what_to_change():
    log = (
        "preflight: Is this machine good enough?\nerror: preflight failed (exit code 3): "
        "gpu-count: 0 GPUs, 2 are needed\n  fix: set gpus.count\n"
    )
    found = explain_install("flash", [checking("Failed", containerStatuses=[{}])], log, [])
    assert (found.state, found.fix, found.node) == ("failed", "set gpus.count", "n")
    assert found.reason == (
        "the install was stopped by its preflight: preflight failed (exit code 3): "
        "gpu-count: 0 GPUs, 2 are needed"
    )


def test_an_install_whose_preflight_found_no_node_in_time_quotes_the_scheduler():
    def event(name: str, message: str) -> dict:
        return {"type": "Warning", "involvedObject": {"name": name}, "message": message}

    job = "flash-moe-appliance-preflight"
    events = [
        event(f"{job}-x1", "0/1 nodes are available: 1 Insufficient nvidia.com/gpu."),
        event(job, "Job was active longer than specified deadline"),
        event("flashier-moe-appliance-preflight", "0/1 nodes are available: another release's"),
    ]
    found = explain_install("flash", [], "", events)
    assert found.state == "failed" and "Insufficient nvidia.com/gpu" in found.reason
    assert "gpus.count" in found.fix
    assert explain_install("flash", [], "", events[2:]) is None


def test_an_install_that_still_waits_for_its_preflight_is_pending_or_starting():
    waiting = checking("Pending", conditions=[
        {"type": "PodScheduled", "status": "False", "message": "0/1 nodes: Insufficient cpu"}
    ])  # fmt: skip
    found = explain_install("flash", [waiting], "", [])
    assert found.state == "pending" and "Insufficient cpu" in found.reason
    running = checking("Running", containerStatuses=[{"ready": True}])
    assert explain_install("flash", [running], "", []).state == "starting"
