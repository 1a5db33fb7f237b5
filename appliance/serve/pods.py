"""What a cluster's objects say about the appliance: a state, a reason, the value to set. Pure.

The arguments are the API's own JSON.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from preflight.counted import counted

Json = Mapping[str, Any]
RECORD = "APPLIANCE_RECORD"
STOPPED = "the install was stopped by its preflight"
UNPULLED = ("ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull")


@dataclass(frozen=True)
class Found:
    """`state`: stopped, pending, starting, ready or failed; `reason` says why it is not ready.

    `record`: which deployment's record the pod was started from; empty where none.
    """

    state: str
    reason: str | None
    fix: str | None
    pod: str | None
    node: str | None
    image_digest: str | None
    restarts: int
    record: str | None = None


def explain(deployment: Json, pods: Sequence[Json], events: Sequence[Json]) -> Found:
    """What the objects say, worst news first."""
    if not deployment["spec"].get("replicas", 1):
        return Found("stopped", "scaled to 0", "appliance up", None, None, None, 0)
    living = [pod for pod in pods if not pod["metadata"].get("deletionTimestamp")]
    if not living:
        return Found("pending", _refused(deployment, events), _quota_fix(events), None, None,
                     None, 0)  # fmt: skip
    pod = max(living, key=lambda one: str(one["metadata"].get("creationTimestamp")))
    states = pod["status"].get("containerStatuses") or [{}]
    first = states[0]
    state, reason, fix = _judged(pod, first)
    return Found(
        state=state,
        reason=reason,
        fix=fix,
        pod=pod["metadata"]["name"],
        node=pod["spec"].get("nodeName"),
        image_digest=(first.get("imageID") or "").rpartition("@")[2] or None,
        restarts=first.get("restartCount", 0),
        record=_record(pod),
    )


def explain_install(
    release: str, pods: Sequence[Json], log: str, events: Sequence[Json]
) -> Found | None:
    """How the chart's preflight is, before there is a deployment. None where nothing is left of it.

    `pods`: the preflight's; `log`: of the newest. A pod that never ran goes with its Job's
    deadline: what is left of it are events.
    """
    if pods:
        pod = max(pods, key=lambda one: str(one["metadata"].get("creationTimestamp")))
        name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
        if pod["status"].get("phase") != "Failed":
            first = (pod["status"].get("containerStatuses") or [{}])[0]
            state, reason, fix = _judged(pod, first)
            state = "starting" if state == "ready" else state
            words = f"the install waits for its preflight: {reason or 'it is running'}"
            return Found(state, words, fix, name, node, None, 0)
        errors = [line for line in log.splitlines() if line.startswith("error: ")]
        fixes = [line for line in log.splitlines() if line.startswith("  fix: ")]
        why = refusal(pod) or (errors[-1] if errors else " ".join(log.split()[-40:]))
        fix = fixes[-1].removeprefix("  fix: ") if fixes else "correct it, then helm uninstall"
        return Found(
            "failed", f"{STOPPED}: {why.removeprefix('error: ')}", fix, name, node, None, 0
        )
    said = [str(event.get("message")) for event in events if _is_of_preflight(event, release)]
    if not said:
        return None
    scheduler = [words for words in said if "nodes are available" in words]
    words = (scheduler or said)[-1]
    return Found("failed", f"{STOPPED}: {words}", _scheduling_fix(words), None, None, None, 0)


def _is_of_preflight(event: Json, release: str) -> bool:
    name = str((event.get("involvedObject") or {}).get("name") or "")
    ours = re.fullmatch(rf"{re.escape(release)}(-[a-z0-9-]+)?-preflight(-[a-z0-9]+)?", name)
    return ours is not None and event.get("type") == "Warning"


def waiting_reason(pod: Json) -> str | None:
    """Why the pod's image cannot be had; None where that is not what it waits for."""
    for container in pod["status"].get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") in UNPULLED:
            return f"the image cannot be pulled: {waiting.get('message') or waiting['reason']}"
    return None


def unscheduled(pod: Json) -> str | None:
    """The scheduler's words on a pod that has no node yet; None where it has one."""
    for condition in pod["status"].get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            return str(condition.get("message") or condition.get("reason") or "not scheduled yet")
    return None


def refusal(pod: Json) -> str | None:
    """Why kubelet does not take the pod: no container ran, so there is no log to read."""
    status = pod["status"]
    if status.get("phase") != "Failed" or status.get("containerStatuses"):
        return None
    said = status.get("message") or status.get("reason") or "it did not say why"
    return f"the node {pod['spec'].get('nodeName')} does not take the pod: {said}"


def once_pod(
    template: Json, name: str, image: str, argv: Sequence[str], *, node: str | None, state: bool
) -> dict[str, Any]:
    """A pod that runs one command as the appliance's own pod would: same node, user and rights."""
    spec = template["spec"]
    container = spec["containers"][0]
    mounts = [m for m in container["volumeMounts"] if state and m["name"] == "state"]
    volumes = [v for v in spec["volumes"] if state and v["name"] == "state"]
    kept = ("imagePullSecrets", "securityContext", "tolerations", "serviceAccountName")
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name},
        "spec": {
            **{key: spec[key] for key in kept if key in spec},
            **({"nodeName": node} if node else {}),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "volumes": volumes,
            "containers": [{
                "name": "once",
                "image": image,
                "imagePullPolicy": container.get("imagePullPolicy", "IfNotPresent"),
                "command": list(argv),
                "env": [{"name": "APPLIANCE_STATE_DIR", "value": "/var/lib/appliance"}],
                "securityContext": container["securityContext"],
                "volumeMounts": mounts,
                # Little is asked for: the appliance may have the node's whole CPUs.
                "resources": {
                    "limits": {"cpu": "1", "memory": "1Gi"},
                    "requests": {"cpu": "100m", "memory": "256Mi"},
                },
            }],
        },
    }  # fmt: skip


def _record(pod: Json) -> str | None:
    for container in pod["spec"].get("containers") or ():
        for variable in container.get("env") or ():
            if variable["name"] == RECORD:
                return str(variable.get("value") or "")
    return None


def _judged(pod: Json, container: Json) -> tuple[str, str | None, str | None]:
    if words := unscheduled(pod):
        return "pending", f"the scheduler: {words}", _scheduling_fix(words)
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason = waiting.get("reason")
    if unpulled := waiting_reason(pod):
        return "failed", unpulled, "set image.repository and image.digest, or image.pullSecrets"
    if reason == "CrashLoopBackOff":
        last = (container.get("lastState") or {}).get("terminated") or {}
        code = last.get("exitCode")
        ended = counted(container.get("restartCount", 0), "time")
        return (
            "failed",
            f"it ended {ended}, last with exit code {code}",
            "kubectl logs --previous says why; settings.holdOnFailure=true holds it",
        )
    if container.get("ready"):
        return "ready", None, None
    return "starting", waiting.get("message"), None


def _scheduling_fix(words: str) -> str:
    table = (
        ("nvidia.com/gpu", "free the GPUs of a node, or set gpus.count to what a node has"),
        ("taint", "set tolerations for the node's taint"),
        ("memory", "set resources.memoryGiB to what a node can give"),
        ("hugepages", "reserve huge pages on the node, or set hugePages.size empty"),
        ("cpu", "set resources.cpu to what a node can give"),
        ("node affinity", "set nodeSelector and affinity to match a node"),
        ("PersistentVolumeClaim", "bind the claim: kubectl describe pvc"),
    )
    return next((fix for name, fix in table if name in words), "kubectl describe pod")


def _refused(deployment: Json, events: Sequence[Json]) -> str:
    for condition in deployment.get("status", {}).get("conditions") or ():
        if condition["type"] == "ReplicaFailure" and condition["status"] == "True":
            return f"no pod could be made: {condition.get('message')}"
    for event in reversed(list(events)):
        if event.get("reason") == "FailedCreate":
            return f"no pod could be made: {event.get('message')}"
    return "no pod was made yet"


def _quota_fix(events: Sequence[Json]) -> str:
    if any("exceeded quota" in str(event.get("message")) for event in events):
        return "raise the namespace's ResourceQuota, or ask for less"
    return "kubectl describe replicaset"
