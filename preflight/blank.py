"""Takes out of a recording what names the machine: serials, hosts, addresses, UUIDs."""

from __future__ import annotations

import re
from typing import Any

GPU_UUID = re.compile(r"\b(GPU|MIG)-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
UUID = re.compile(r"(?<![-\w])[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}\b")
MAC = re.compile(r"(?<![:\w])(?:[0-9a-fA-F]{2}:){5}[0-9a-fA-F]{2}(?![:\w])")
OCTET = r"(?:0|[1-9]\d?|1\d\d|2[0-4]\d|25[0-5])"
IPV4 = re.compile(rf"(?<![\d.])(?:{OCTET}\.){{3}}{OCTET}(?![\d.])")
IPV6 = re.compile(r"(?<![:\w])(?:[0-9a-fA-F]{1,4}:){7}[0-9a-fA-F]{1,4}(?![:\w])")
SERIAL = re.compile(r"((?:Serial Number|Serial|GPU PDI|Board Part Number)\s*:\s*)(?!N/A)\S+", re.I)
SERIAL_XML = re.compile(r"(<(serial|chassis_serial_number|gpu_pdi|board_part_number)>)(?!N/A)[^<]+")
BUILDER = re.compile(r"\([\w.+-]+@[\w.-]+\)")
REMOTE = re.compile(r"^(?:\[[^\]]+\]|[\w.-]+):(?=/)|(?<=//)[\w.-]+(?=/)", re.M)
TCP = re.compile(r"\b[0-9A-F]{8}(?:[0-9A-F]{24})?:(?=[0-9A-F]{4}\b)")
KERNEL_LINES = re.compile(
    r"NVRM|Xid|fallen|DMAR|iommu|AER|CONSTRAINT_|oom|out of memory|shmem-rss", re.I
)
SECRET = {"serial", "Serial"}


class Blanker:
    """Replaces the same identity by the same placeholder everywhere in one recording."""

    def __init__(self, hostname: str | None) -> None:
        self._uuids: dict[str, str] = {}
        self._host = None
        # "localhost" and one-letter names would blank ordinary words.
        if hostname and len(hostname) > 2 and hostname != "localhost":
            self._host = re.compile(rf"(?<![\w-]){re.escape(hostname)}(?![\w-])")

    def answer(self, kind: str, words: tuple[str, ...], found: Any) -> Any:
        """The same answer without identities. Shapes and numbers stay as they are."""
        if kind == "read":
            return self._file(words[0], found)
        if kind == "run" and words[0] == "dmesg":
            kept = [line for line in found[1].splitlines() if KERNEL_LINES.search(line)]
            return [found[0], self.text("\n".join(kept))]
        if kind == "nvml" and words[0] == "nvmlDeviceGetSerial":
            return "0"
        if kind == "nvml" and words[0].endswith("RunningProcesses"):
            # pids name nothing once the machine is gone, but their order is the only identity.
            return self._walk(found)
        return self._walk(found)

    def text(self, text: str) -> str:
        """One text without identities."""
        text = GPU_UUID.sub(self._gpu, text)
        text = UUID.sub("00000000-0000-0000-0000-000000000000", text)
        text = MAC.sub("00:00:00:00:00:00", text)
        text = IPV6.sub("::", text)
        text = IPV4.sub("0.0.0.0", text)
        text = SERIAL.sub(r"\g<1>0", text)
        text = SERIAL_XML.sub(r"\g<1>0", text)
        text = BUILDER.sub("(builder)", text)
        return self._host.sub("host", text) if self._host else text

    def _file(self, path: str, text: str) -> str:
        if path.endswith("/mounts"):
            text = REMOTE.sub(lambda m: "host:" if m.group().endswith(":") else "host", text)
        if path.startswith("/proc/self/net/tcp"):
            text = TCP.sub("00000000:", text)
        return self.text(text)

    def _gpu(self, match: re.Match[str]) -> str:
        number = len(self._uuids)
        found = match.group()
        if found not in self._uuids:
            self._uuids[found] = f"{match.group(1)}-00000000-0000-0000-0000-{number:012d}"
        return self._uuids[found]

    def _walk(self, found: Any) -> Any:
        if isinstance(found, str):
            return self.text(found)
        if isinstance(found, dict):
            return {k: "0" if k in SECRET else self._walk(v) for k, v in found.items()}
        if isinstance(found, list):
            return [self._walk(item) for item in found]
        return found
