"""An appliance that the Helm chart installed: how it is, its log, commands in it, stopping it.

The chart makes the objects (`helm install`); this looks at them and scales them. The only importer
of the kubernetes client.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from appliance.errors import ServeError, UsageError, with_extra
from appliance.serve.pods import (
    Found,
    explain,
    explain_install,
    once_pod,
    refusal,
    unscheduled,
    waiting_reason,
)

CONTAINER = "appliance"
LIMIT_SECONDS = 30
ONCE_SECONDS = 900.0  # a pull of gigabytes included
TICK_SECONDS = 1.0


@dataclass(frozen=True)
class Release:
    """A Helm release in a namespace of a context; None: the current one."""

    name: str
    namespace: str
    context: str | None = None

    @property
    def selector(self) -> str:
        return self.part("appliance")

    def part(self, component: str) -> str:
        return f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"


def current_context() -> str | None:
    """The context that kubectl would use now. None where none can be read: a look says why."""
    try:
        import kubernetes
    except ImportError:
        return None
    try:
        return str(kubernetes.config.list_kube_config_contexts()[1]["name"])
    except (kubernetes.config.ConfigException, KeyError, TypeError):
        return None


def status(release: Release) -> Found:
    """How the release is. Raises ServeError where it is not there or nobody may look."""
    with _client(release) as (core, apps, plain):
        if not _deployments(apps, release) and (stopped := _install(core, plain, release)):
            return stopped
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


def pods_left(release: Release) -> int:
    """Pods of the release that still exist, those that are ending included."""
    with _client(release) as (core, _, _):
        listed = core.list_namespaced_pod(
            release.namespace, label_selector=release.selector, _request_timeout=LIMIT_SECONDS
        )
        return len(listed.items)


def inside(release: Release, argv: Sequence[str], limit_seconds: float) -> tuple[int, str]:
    """Exit code and output of a command in the live container."""
    found = status(release)
    if found.pod is None:
        raise ServeError("there is no pod to run a command in", fix=found.fix)
    with _client(release) as (core, _, _):
        from kubernetes.stream import stream

        session = stream(
            core.connect_get_namespaced_pod_exec, found.pod, release.namespace,
            container=CONTAINER, command=list(argv), stdout=True, stderr=True,
            _preload_content=False,
        )  # fmt: skip
        return verdict(session, argv, limit_seconds)


def verdict(session: Any, argv: Sequence[str], limit_seconds: float) -> tuple[int, str]:
    """Exit code and output of an exec's session. Raises ServeError where it ends without a code."""
    try:
        session.run_forever(timeout=limit_seconds)
        code = session.returncode  # before the output: reading that throws the verdict away
    except Exception as error:
        # Of a container that goes meanwhile the client says nothing of its own: it stumbles over
        # the status that did not come (TypeError, KeyError), or over the connection.
        raise ServeError(f"{' '.join(argv)}: the container was gone before it ended") from error
    if code is None:
        session.close()
        raise ServeError(f"{' '.join(argv)} did not end within {limit_seconds:.0f} s")
    return int(code), str(session.read_all())


def once(release: Release, image: str, argv: Sequence[str], *, state: bool) -> tuple[str, str]:
    """Run a command in a pod of its own, where the appliance runs: its log and image digest.

    With the state volume where `state`. Raises ServeError with the reason where it does not end
    well; the pod is removed either way.
    """
    name = f"{release.name}-once-{uuid.uuid4().hex[:6]}"
    with _client(release) as (core, apps, plain):
        template = plain(_deployment(apps, release))["spec"]["template"]
        pod = once_pod(template, name, image, argv, node=status(release).node, state=state)
        core.create_namespaced_pod(release.namespace, pod, _request_timeout=LIMIT_SECONDS)
        try:
            return _ended(core, plain, release, name)
        finally:
            core.delete_namespaced_pod(
                name, release.namespace, grace_period_seconds=0, _request_timeout=LIMIT_SECONDS
            )


def _ended(core: Any, plain: Any, release: Release, name: str) -> tuple[str, str]:
    deadline = time.monotonic() + ONCE_SECONDS
    pod: Any = {"status": {}}
    while time.monotonic() < deadline:
        pod = plain(
            core.read_namespaced_pod(name, release.namespace, _request_timeout=LIMIT_SECONDS)
        )
        phase = pod["status"].get("phase")
        if refused := refusal(pod):
            raise ServeError(refused, fix="kubectl describe node says what is taken there")
        if phase in ("Succeeded", "Failed"):
            text = core.read_namespaced_pod_log(
                name, release.namespace, _request_timeout=LIMIT_SECONDS
            )
            if phase == "Succeeded":
                digest = pod["status"]["containerStatuses"][0].get("imageID") or ""
                return str(text), digest.rpartition("@")[2].rpartition("//")[2]
            last = " ".join(str(text).split()[-40:])
            raise ServeError(f"the image does not do {name}: {last or 'it said nothing'}")
        if reason := waiting_reason(pod):
            raise ServeError(reason, fix="correct the image's name, or image.pullSecrets")
        time.sleep(TICK_SECONDS)
    why = f": the scheduler: {words}" if (words := unscheduled(pod)) else ""
    raise ServeError(f"a pod with that image did not end within {ONCE_SECONDS:.0f} s{why}")


def _install(core: Any, plain: Any, release: Release) -> Found | None:
    """Of a release that has only got as far as its preflight, which runs before all else."""
    listed = core.list_namespaced_pod(
        release.namespace, label_selector=release.part("preflight"), _request_timeout=LIMIT_SECONDS
    )
    pods = plain(listed)["items"]
    log = ""
    if failed := [pod for pod in pods if pod["status"].get("containerStatuses")]:
        newest = max(failed, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))
        if newest["status"].get("phase") == "Failed":
            log = core.read_namespaced_pod_log(
                newest["metadata"]["name"], release.namespace, _request_timeout=LIMIT_SECONDS
            )
    events = core.list_namespaced_event(release.namespace, _request_timeout=LIMIT_SECONDS)
    return explain_install(release.name, pods, str(log), plain(events)["items"])


def _deployments(apps: Any, release: Release) -> list[Any]:
    return list(apps.list_namespaced_deployment(
        release.namespace,
        label_selector=f"app.kubernetes.io/instance={release.name}",
        _request_timeout=LIMIT_SECONDS,
    ).items)  # fmt: skip


def _deployment(apps: Any, release: Release) -> Any:
    found = _deployments(apps, release)
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
            fix=with_extra("kubernetes"),
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
