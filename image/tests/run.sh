#!/bin/bash
# What `make check-image` runs: build the image and test it for real, in a Docker engine of its own
# that is ended afterwards. As root; needs MOE_APPLIANCE_SHARED or the folder beside the checkout.
# `run.sh node` (`make check-node`): the chart's tests instead, on a Kubernetes node (node.sh).
# `run.sh gpu` (`make check-gpu-image`): the gpu flavour instead (gpu.sh), leaving the network alone.
set -euo pipefail
cd "$(dirname "$0")/../.."
here=$PWD
shared=${MOE_APPLIANCE_SHARED:-$here/../shared}
folder=$(mktemp -d "${TMPDIR:-/tmp}/appliance-image.XXXXXX")
finish() {
    "$here/image/tests/node.sh" stop "$folder" || true
    "$here/image/tests/engine.sh" stop "$folder"
    rm -rf "$folder"
}
trap finish EXIT

export MOE_APPLIANCE_SHARED=$shared
apt-get update -qq
image/tests/engine.sh start "$folder" "$([ "${1:-}" = gpu ] || echo bridge)"
export DOCKER_HOST=unix://$folder/docker.sock
export APPLIANCE_DEMO_BASE_IMAGE=local/python:ci APPLIANCE_BASE_IMAGE=local/python:ci
"$shared/tools/make-base-image.sh" local/python:ci

if [ "${1:-}" = gpu ]; then
    image/tests/gpu.sh "$folder"
    exit
fi

if [ "${1:-}" = node ]; then
    docker compose build --quiet demo
    [ -x .venv/chart-tools/helm/helm ] || PYTHONPATH=tests .venv/bin/python -c \
        'from pathlib import Path; from charts import fetch; fetch(Path(".venv/chart-tools"))'
    python3 -m pip install --quiet --no-deps --require-hashes --target "$folder/client" \
        -r constraints/cluster-client.txt
    PYTHON=$here/.venv/bin/python image/tests/node.sh start "$folder"
    export KUBECONFIG=$folder/node/kubeconfig PATH=$here/.venv/chart-tools/helm:$PATH
    PYTHONPATH=$folder/client .venv/bin/pytest -v -s --durations=0 --durations-min=1 image/tests/test_cluster.py
    exit
fi

(cd "$folder" && apt-get download -qq prometheus && dpkg-deb -x prometheus_*.deb prometheus)
"$folder/prometheus/usr/bin/promtool" check rules helm/monitoring/rules.yml
"$folder/prometheus/usr/bin/promtool" check config --syntax-only monitoring/prometheus.yml
"$folder/prometheus/usr/bin/promtool" test rules image/tests/rules.test.yml

docker compose --profile metrics --profile demo config --quiet
time docker compose build --quiet demo
docker image ls
python3 -m pip install --quiet --no-deps --require-hashes --target "$folder/client" \
    -r constraints/docker-client.txt
docker build -q -t local/prometheus --build-arg BASE_IMAGE=local/python:ci \
    - <image/tests/prometheus.Dockerfile
PROMETHEUS_IMAGE=local/prometheus PYTHONPATH=$folder/client \
    .venv/bin/pytest -v -s --durations=0 --durations-min=1 image/tests --ignore image/tests/test_cluster.py --ignore image/tests/test_gpu_image.py
