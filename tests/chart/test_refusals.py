"""Every impossible set of values is refused, with the value to set."""

import pytest

CPU = ("flavour=cpu", "gpus.count=0", "memlock=none")
IMPOSSIBLE = [
    (("image.repository=",), "set image.repository to where the image is"),
    (("image.digest=latest",), "does not match pattern"),
    (("gpus.count=0",), "set gpus.count to 1 or more, or flavour=cpu"),
    (("flavour=cpu",), "flavour cpu uses no GPU and gpus.count is 2: set gpus.count=0"),
    (("demo=true",), "the demo runs on the CPU: set flavour=cpu and gpus.count=0"),
    (("settings.tensorParallel=4",), "settings.tensorParallel is 4 and gpus.count is 2: set both"),
    (("gpus.count=3",), "experts cannot be split evenly over 3 GPUs: set gpus.count to 1, 2, 4"),
    (("memlock=none",), "set memlock=runtime (LimitMEMLOCK=infinity"),
    (("resources.memoryGiB=8",), "resources.memoryGiB is 8: set it to the host bytes"),
    (("resources.shmGiB=256",), "/dev/shm counts as memory, set resources.shmGiB lower"),
    (("resources.cpu=7.5",), "only whole CPUs are given for good, set resources.cpu to 8"),
    (("resources.cpu=1",), "set resources.cpu to 4 or more, one for each worker"),
    (("hugePages.size=2Mi",), "set hugePages.amountGiB to the plan's host bytes"),
    (("hugePages.amountGiB=8",), "set hugePages.size to 2Mi"),
    (("hugePages.size=1Gi", "hugePages.amountGiB=64"), "value must be one of"),  # nothing maps them
    (("model.path=/data/model",), "set model.path to a folder under it, such as /models/current"),
    (("store.type=hostPath",), "set store.hostPath to an absolute path on the node"),
    (("store.type=hostPath", "store.hostPath=models"), 'store.hostPath is "models"'),
    (("store.hostPath=/srv",), "set store.type=hostPath, or leave store.hostPath empty"),
    (("store.type=existingClaim",), "set store.existingClaim to the claim's name"),
    (("store.existingClaim=mine",), "set store.type=existingClaim, or leave store.existingClaim"),
    (("store.sizeGiB=0",), "set store.sizeGiB to the size of the checkpoint"),
    (("settings.drainSeconds=100",), "set terminationGracePeriodSeconds to 130 or more"),
    (("settings.hangSeconds=90",), "set settings.hangSeconds to 45 or less"),
    (("settings.startLimitSeconds=60",), "set settings.startLimitSeconds above loadSeconds"),
    (("service.agentPort=8000",), "set service.agentPort to another port, such as 8001"),
    (("service.type=NodePort", "networkPolicy.enabled=false"), "set networkPolicy.enabled=true"),
    (("apiKeys.secretKey=",), "set apiKeys.secretKey to the Secret's entry"),
    (("serviceAccount.create=false",), "set serviceAccount.name to an account with no rights"),
    (("monitoring.serviceMonitor=true",), "install the Prometheus operator, or set monitoring"),
    (("monitoring.rules=true",), "install the Prometheus operator, or set monitoring.rules=false"),
    (("replicas=2",), "additional properties 'replicas' not allowed"),
    (("gpus.cuont=2",), "additional properties 'cuont' not allowed"),
    (("settings.hostShare=1.5",), "maximum: got 1.5, want 1"),
    (("loadSeconds=soon",), "got string, want integer"),
]


@pytest.mark.parametrize(("values", "sentence"), IMPOSSIBLE, ids=lambda v: str(v)[:40])
def test_an_impossible_set_of_values_is_refused_with_the_value_to_set(helm, values, sentence):
    assert sentence in helm.refusal(*values)


def test_there_are_at_least_25_of_them():
    assert len({values for values, _ in IMPOSSIBLE}) >= 25


@pytest.mark.parametrize(
    "values",
    [
        (),
        CPU,
        (*CPU, "demo=true"),
        ("gpus.count=8", "resources.cpu=32"),
        ("store.type=hostPath", "store.hostPath=/srv/models"),
        ("hugePages.size=2Mi", "hugePages.amountGiB=64", "memlock=root"),
        ("apiKeys.existingSecret=mine",),
    ],
)
def test_possible_values_are_not_refused(helm, values):
    assert helm.render(*values)
