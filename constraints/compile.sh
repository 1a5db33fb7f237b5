#!/bin/sh
# Write the pins again after editing a .in file (needs uv). No addresses are recorded.
set -eu
cd "$(dirname "$0")"
compile() {
    uv pip compile -q --universal --python-version 3.11 --generate-hashes --no-header \
        --no-annotate "$@"
}
# The engine's list is complete by itself (ENGINE: three packages left out crash its import).
compile --no-deps engine-cpu.in -o engine-cpu.txt
compile --no-deps vllm-0.33.in -o vllm-0.33.txt
compile -c engine-cpu.in base.in -o base.txt
compile -c engine-cpu.in base.in dev.in -o dev.txt
compile cluster-client.in -o cluster-client.txt
# The gpu image: its own Python and platform, everything resolved.
uv pip compile -q --python-version 3.12 --python-platform x86_64-manylinux_2_28 --generate-hashes \
    --no-header --no-annotate engine-gpu.in -o engine-gpu.txt
