"""The system around it: kernel log, clock, ports, container tools."""

from __future__ import annotations

from preflight.checks.check import FAIL, WARN, Check, Result, Saw, Unseen, cards, refusal, version
from preflight.host import Host, Xid
from preflight.needs import Needs

ARCHITECTURES = ("x86_64", "aarch64")
OLDEST_KERNEL = (5, 15)
OFF_THE_BUS = 79
# NVIDIA's catalogue: those after which the card must be reset or replaced.
FATAL = {48, 62, 64, 74, 94, 95, 109, 110, 119, 120, 136, 140, 143, 149, 154, 155, 156, 158}


def supported_architecture(host: Host, needs: Needs) -> Result:
    found = host.software.architecture
    if found is None:
        yield Unseen("the processor's architecture")
    elif found not in ARCHITECTURES:
        yield Saw(f"the processor is {found}; there are builds for {' and '.join(ARCHITECTURES)}")


def kernel_new_enough(host: Host, needs: Needs) -> Result:
    found = version(host.software.kernel)
    if found is None:
        yield Unseen("the kernel's version")
    elif found[:2] < OLDEST_KERNEL:
        yield Saw(f"kernel {host.software.kernel} is older than 5.15")


def governor_is_fast(host: Host, needs: Needs) -> Result:
    found = host.software.cpu_governor
    if found is None:
        if host.software.virtualisation != "virtual":  # a guest has no say in it
            yield Unseen("the CPU frequency governor")
    elif found == "powersave":
        yield Saw("the CPU frequency governor is powersave: every step waits for slow cores")


def clock_is_kept(host: Host, needs: Needs) -> Result:
    if host.software.clock_synchronised is None:
        yield Unseen("whether the clock is synchronised")
    elif not host.software.clock_synchronised:
        yield Saw("nothing keeps the clock right: certificates and logs go wrong")


def port_is_free(host: Host, needs: Needs) -> Result:
    if needs.port is None:
        return
    if host.software.ports_listening is None:
        yield Unseen("the ports in use")
    elif needs.port in host.software.ports_listening:
        fix = f"choose another with --port, or: sudo ss -ltnp | grep :{needs.port}"
        yield Saw(f"port {needs.port} is in use", fix)


def _by_card(xids: tuple[Xid, ...]) -> dict[str, list[Xid]]:
    found: dict[str, list[Xid]] = {}
    for xid in xids:
        found.setdefault((xid.pci_address or "?").split(".")[0], []).append(xid)
    return found


def _gone(errors: list[Xid]) -> bool:
    return any(xid.code in (None, OFF_THE_BUS) for xid in errors)


def no_card_left_the_bus(host: Host, needs: Needs) -> Result:
    if needs.device == "cpu" or not (host.gpus or host.pci_gpus):
        return
    if host.software.xids is None:
        yield Unseen("the kernel log (run as root)")
        return
    for slot, errors in _by_card(host.software.xids).items():
        if _gone(errors):
            yield Saw(f"{slot} has fallen off the bus since boot: {_told(errors)}")


def no_fatal_errors(host: Host, needs: Needs) -> Result:
    if needs.device == "cpu" or not (host.gpus or host.pci_gpus):
        return
    if host.software.xids is None:
        yield Unseen("the kernel log (run as root)")
        return
    for slot, errors in _by_card(host.software.xids).items():
        if not _gone(errors) and any(xid.code in FATAL for xid in errors):
            yield Saw(f"{slot} had errors that ask for a reset since boot: {_told(errors)}")


def no_other_errors(host: Host, needs: Needs) -> Result:
    if needs.device == "cpu" or not (host.gpus or host.pci_gpus):
        return
    if host.software.xids is None:
        yield Unseen("the kernel log (run as root)")
        return
    for slot, errors in _by_card(host.software.xids).items():
        if not _gone(errors) and not any(xid.code in FATAL for xid in errors):
            yield Saw(f"{slot} had {len(errors)} driver errors since boot: {_told(errors)}")


def _told(errors: list[Xid]) -> str:
    last = errors[-1]
    codes = [str(xid.code) for xid in errors if xid.code is not None]
    said = f"Xid {', '.join(dict.fromkeys(codes))}" if codes else "no Xid"
    return f"{said} ({last.text[:60]})"


def docker_there(host: Host, needs: Needs) -> Result:
    if needs.deployment == "docker" and host.software.docker is None:
        if refusal(host, "docker "):
            yield Unseen(f"docker ({refusal(host, 'docker ')})")
        else:
            yield Saw("docker does not answer")


def toolkit_there(host: Host, needs: Needs) -> Result:
    if needs.deployment != "docker" or needs.device == "cpu" or host.software.docker is None:
        return
    if host.software.container_toolkit is None:
        if refusal(host, "nvidia-ctk"):
            yield Unseen(f"the container toolkit ({refusal(host, 'nvidia-ctk')})")
        else:
            yield Saw('the NVIDIA container toolkit is not installed: docker says "could not '
                      'select device driver"')  # fmt: skip


def cdi_described(host: Host, needs: Needs) -> Result:
    if needs.deployment != "docker" or needs.device == "cpu":
        return
    specs = host.software.cdi_specs
    if specs == () and host.software.docker_cgroup_driver == "systemd":
        return  # docker-loses-devices says it
    if specs is None:
        yield Unseen("the CDI specifications")
    elif not any("nvidia" in name for name in specs) and host.software.container_toolkit:
        yield Saw("no CDI specification describes the cards")


def daemon_keeps_devices(host: Host, needs: Needs) -> Result:
    """CDI lists the devices in the container's own configuration, so systemd keeps them."""
    soft = host.software
    if needs.deployment != "docker" or needs.device == "cpu" or soft.docker is None:
        return
    if soft.docker_cgroup_driver is None or soft.cdi_specs is None:
        yield Unseen("docker's cgroup driver and the CDI specifications")
    elif soft.docker_cgroup_driver == "systemd" and not soft.cdi_specs:
        yield Saw("docker leaves devices to systemd: systemctl daemon-reload takes the GPU "
                  "from running containers")  # fmt: skip


def killed_before(host: Host, needs: Needs) -> Result:
    if host.software.memory_kills is None:
        if cards(host, needs):
            yield Unseen("the kernel log (run as root)")
        return
    for kill in host.software.memory_kills:
        yield Saw(f"the kernel killed {kill} for want of memory since boot")


AREA = "system"
XIDS = "NVIDIA Xid catalogue"
TOOLKIT = "NVIDIA container toolkit installation guide"
CHECKS = (
    Check("architecture-unsupported", AREA, FAIL, supported_architecture, "x86_64 or aarch64",
          "the builds there are", "use another machine"),
    Check("kernel-old", AREA, WARN, kernel_new_enough, "5.15 or newer",
          "CUDA 13 installation guide, supported distributions", "upgrade the distribution"),
    Check("cpu-governor-powersave", AREA, WARN, governor_is_fast, "not powersave", "cpufreq",
          "echo performance | sudo tee /sys/devices/system/cpu/cpu*/cpufreq/scaling_governor"),
    Check("clock-unsynchronised", AREA, WARN, clock_is_kept, "synchronised", "adjtimex(2)",
          "sudo timedatectl set-ntp true"),
    Check("port-taken", AREA, FAIL, port_is_free, "the port is free", "/proc/self/net/tcp",
          "choose another with --port"),
    Check("gpu-off-the-bus", AREA, FAIL, no_card_left_the_bus, "no Xid 79 and no such line", XIDS,
          "power the machine off and on; if it comes back: power cables, riser, then the card"),
    Check("xid-fatal", AREA, FAIL, no_fatal_errors, "no error that asks for a reset", XIDS,
          "sudo nvidia-smi --gpu-reset, or reboot; if it comes back: replace the card"),
    Check("xid-seen", AREA, WARN, no_other_errors, "no error since boot", XIDS,
          "look the number up in NVIDIA's catalogue; most are a program's fault"),
    Check("memory-kills-seen", AREA, WARN, killed_before, "none since boot", "the kernel log",
          "give the group more memory, or plan with fewer experts on the host"),
    Check("docker-missing", AREA, FAIL, docker_there, "docker answers", "docker info",
          "sudo systemctl start docker; sudo usermod -aG docker $USER"),
    Check("container-toolkit-missing", AREA, FAIL, toolkit_there, "nvidia-ctk is there", TOOLKIT,
          "sudo apt install nvidia-container-toolkit && sudo nvidia-ctk runtime configure "
          "--runtime=docker && sudo systemctl restart docker"),
    Check("cdi-missing", AREA, WARN, cdi_described, "a CDI specification", TOOLKIT,
          "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml"),
    Check("docker-loses-devices", AREA, WARN, daemon_keeps_devices,
          "CDI, or docker with the cgroupfs driver", "NVIDIA container toolkit issue 251",
          "sudo nvidia-ctk cdi generate --output=/etc/cdi/nvidia.yaml, or "
          '"exec-opts": ["native.cgroupdriver=cgroupfs"] in /etc/docker/daemon.json'),
)  # fmt: skip
