"""Compile every kernel that the appliance loads, so that nothing compiles at start.

`python compile.py build OUT` with TORCH_CUDA_ARCH_LIST set writes OUT/libexpert_kernels.so,
OUT/triton and OUT/build.json: what compiled them, for which cards, how long it took, how large they
are. With WITH_VLLM_EXL3 also exllamav3's extension, which that plugin needs and ours does not.
`python compile.py check OUT`: the library there is of these very sources.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

BUILD = Path("/build/kernels")
LIBRARY = "libexpert_kernels.so"
# Triton compiles its driver binding with a C compiler at first use and keeps it under a key made of
# the source and of where libcuda is: so that place is fixed (TRITON_LIBCUDA_PATH, here and in the
# image), and what is compiled here is put into the cache of each start (appliance/container.py).
DRIVER = """
from triton.backends.nvidia import driver
from triton.runtime.build import compile_so_from_file
compile_so_from_file(
    src_path=driver.dirname + "/driver.c", name="cuda_utils", library_dirs=driver.library_dirs(),
    include_dirs=driver.include_dirs, libraries=driver.libraries,
)
"""


def toolkit() -> Path:
    """Where the engine's own pins put nvcc."""
    found = sorted(Path(sysconfig.get_path("purelib")).glob("nvidia/*/bin/nvcc"))
    if not found:
        sys.exit(
            "no nvcc among the engine's packages: constraints/engine-gpu.txt pins nvidia-cuda-nvcc"
        )
    return found[-1].parent.parent


def timed(work: object) -> float:
    started = time.monotonic()
    work()  # type: ignore[operator]
    return round(time.monotonic() - started, 1)


def run(*argv: str, **environment: str) -> None:
    subprocess.run(argv, check=True, env={**os.environ, **environment})


def ours(out: Path, architectures: list[str]) -> None:
    run(sys.executable, "-m", "expert_kernels.build", "--out", str(out), "--arch", *architectures,
        PYTHONPATH=str(BUILD))  # fmt: skip


def triton_driver(out: Path) -> None:
    # A library of the right name to link against; the driver's own takes its place on a GPU's host.
    here = Path(os.environ["TRITON_LIBCUDA_PATH"])
    stub = here / "libcuda.so.1"
    if not stub.exists():
        run("gcc", "-shared", "-Wl,-soname,libcuda.so.1", "-o", str(stub), "-x", "c", os.devnull)
        (here / "libcuda.so").symlink_to(stub)
    run(sys.executable, "-c", DRIVER, TRITON_CACHE_DIR=str(out / "triton"))


def exllamav3(out: Path) -> None:
    work = out / "work"
    # Importing exllamav3 compiles its extension where there is none.
    run(sys.executable, "-c", "import exllamav3.ext", TORCH_EXTENSIONS_DIR=str(work))
    (built,) = work.rglob("exllamav3_ext.so")
    shutil.copyfile(built, out / built.name)
    shutil.rmtree(work)


def build(out: Path) -> None:
    home = toolkit()
    os.environ |= {"CUDA_HOME": str(home), "PATH": f"{home / 'bin'}:{os.environ['PATH']}",
                   "CPATH": str(home / "include"), "LIBRARY_PATH": str(home / "lib")}  # fmt: skip
    out.mkdir(parents=True, exist_ok=True)
    numbers = os.environ["TORCH_CUDA_ARCH_LIST"].split()
    architectures = [f"sm_{number.replace('.', '')}" for number in numbers]
    seconds = {LIBRARY: timed(lambda: ours(out, architectures)),
               "triton": timed(lambda: triton_driver(out))}  # fmt: skip
    if os.environ.get("WITH_VLLM_EXL3"):
        seconds["exllamav3_ext.so"] = timed(lambda: exllamav3(out))
    nvcc = subprocess.run(["nvcc", "--version"], check=True, capture_output=True, text=True)
    facts = {
        "architectures": architectures,
        "nvcc": nvcc.stdout.strip().splitlines()[-1],
        "seconds": seconds,
        "bytes": {path.name: path.stat().st_size for path in sorted(out.glob("*.so"))},
    }
    (out / "build.json").write_text(json.dumps(facts, indent=1) + "\n")
    sys.stdout.write(json.dumps(facts) + "\n")


def check(out: Path) -> None:
    sys.path.insert(0, str(BUILD))
    from expert_kernels.build import digest, source_of

    library = out / LIBRARY
    if not library.is_file():
        sys.exit(f"image/kernels holds no {LIBRARY}: `make kernels`, or build with KERNELS=build")
    if source_of(library) != digest():
        sys.exit(f"image/kernels/{LIBRARY} is of other sources than these: `make kernels`")
    (out / Path(__file__).name).unlink()


if __name__ == "__main__":
    {"build": build, "check": check}[sys.argv[1]](Path(sys.argv[2]))
