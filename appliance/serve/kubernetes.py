"""An appliance that the Helm chart installed: how it is, its log, stopping it, starting it again.

The chart makes the objects (`helm install`); this looks at them and scales them. The only importer
of the kubernetes client.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from appliance.errors import ServeError, UsageError

CONTAINER = "appliance"
LIMIT_SECONDS = 30
Json = Mapping[str, Any]


@dataclass(frozen=True)
class Release:
    """A Helm release in a namespace of a context; None: the current one."""

    name: str
    namespace: str
    context: str | None = None

    @property
    def selector(self) -> str:
        return f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component=appliance"


@dataclass(frozen=True)
class Found:
    """`state`: stopped, pending, starting, ready or failed; `reason` says why it is not ready."""

    state: str
    reason: str | None
    fix: str | None
    pod: str | None
    node: str | None
    image_digest: str | None
    restarts: int


def status(release: Release) -> Found:
    """How the release is. Raises ServeError where it is not there or nobody may look."""
    with _client(release) as (core, apps, plain):
        deployment = _deployment(apps, release)
        listed = core.list_namespaced_pod(
            release.namespace, label_selector=release.selector, _request_timeout=LIMIT_SECONDS
        )
        events = core.list_namespaced_event(release.namespace, _request_timeout=LIMIT_SECONDS)
        return explain(plain(deployment), plain(listed)["items"], plain(events)["items"])


def logs(release: Release, lines: int) -> Iterator[str]:
    found = status(release)
    if found.pod is None:
        raise ServeError("there is no pod to read the log of", fix=found.fix)
    with _client(release) as (core, _, _):
        text = core.read_namespaced_pod_log(
            found.pod, release.namespace, container=CONTAINER, tail_lines=lines,
            _request_timeout=LIMIT_SECONDS,
        )  # fmt: skip
    yield from str(text).splitlines()


def scale(release: Release, replicas: int) -> None:
    """0: drain and stop; 1: start again. The GPUs, the weights and the keys stay the release's."""
    if replicas not in (0, 1):
        raise UsageError(f"{replicas} replicas: there is one appliance, or none")
    with _client(release) as (_, apps, _):
        name = _deployment(apps, release).metadata.name
        body = {"spec": {"replicas": replicas}}
        apps.patch_namespaced_deployment_scale(
            name, release.namespace, body, _request_timeout=LIMIT_SECONDS
        )


def explain(deployment: Json, pods: Sequence[Json], events: Sequence[Json]) -> Found:
    """What the objects say, worst news first. Pure; the arguments are the API's own JSON."""
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
    )


def _judged(pod: Json, container: Json) -> tuple[str, str | None, str | None]:
    for condition in pod["status"].get("conditions") or ():
        if condition["type"] == "PodScheduled" and condition["status"] != "True":
            words = condition.get("message") or condition.get("reason") or "not scheduled yet"
            return "pending", f"the scheduler: {words}", _scheduling_fix(words)
    waiting = (container.get("state") or {}).get("waiting") or {}
    reason = waiting.get("reason")
    if reason in ("ErrImagePull", "ImagePullBackOff", "InvalidImageName"):
        return (
            "failed",
            f"the image cannot be pulled: {waiting.get('message')}",
            "set image.repository and image.digest, or image.pullSecrets",
        )
    if reason == "CrashLoopBackOff":
        last = (container.get("lastState") or {}).get("terminated") or {}
        code = last.get("exitCode")
        return (
            "failed",
            f"it ended {container.get('restartCount', 0)} times, last with exit code {code}",
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


def _deployment(apps: Any, release: Release) -> Any:
    found = apps.list_namespaced_deployment(
        release.namespace,
        label_selector=f"app.kubernetes.io/instance={release.name}",
        _request_timeout=LIMIT_SECONDS,
    ).items
    if len(found) != 1:
        raise ServeError(
            f"there is no release {release.name} of the chart in namespace {release.namespace}",
            fix="helm list --all-namespaces, or another --context",
        )
    return found[0]


@contextmanager
def _client(release: Release) -> Iterator[tuple[Any, Any, Any]]:
    """The core and apps APIs, and what makes plain JSON of their objects."""
    try:
        import kubernetes
        import urllib3
    except ImportError as error:
        raise ServeError(
            "the kubernetes client is not installed here",
            fix="pip install 'moe-appliance[kubernetes]'",
        ) from error
    try:
        api = kubernetes.config.new_client_from_config(context=release.context)
    except kubernetes.config.ConfigException as error:
        raise ServeError(
            f"no cluster to talk to: {error}", fix="set KUBECONFIG, or give another --context"
        ) from error
    try:
        yield (
            kubernetes.client.CoreV1Api(api),
            kubernetes.client.AppsV1Api(api),
            api.sanitize_for_serialization,
        )
    except kubernetes.client.ApiException as error:
        raise _sentence(error.status, str(error.reason), release) from error
    except urllib3.exceptions.HTTPError as error:
        raise ServeError(
            f"the cluster at {api.configuration.host} does not answer",
            fix="is this the right context? kubectl config current-context",
        ) from error
    finally:
        api.close()


def _sentence(status: int, reason: str, release: Release) -> ServeError:
    if status in (401, 403):
        return ServeError(
            f"you may not look at namespace {release.namespace}: {reason}",
            fix="ask for the rights to get deployments, pods, pods/log and events there",
        )
    return ServeError(f"the cluster answered {status}: {reason}")
