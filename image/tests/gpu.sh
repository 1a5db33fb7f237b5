#!/bin/bash
# What `make check-gpu-image` does in the engine of engine.sh: the gpu flavour, its kernels from the
# cache stage, started on two fake cards. run.sh calls it.
#
# Kernels: image/kernels if it has them, else those compiled for these sources before (CACHE), else
# compiled once, for one architecture, and kept there. PYTHON312: the folder of a Python 3.12.
set -euo pipefail
cache=${XDG_CACHE_HOME:-$HOME/.cache}/moe-appliance/image-kernels
sources="image/compile.py constraints/engine-gpu.txt kernels/expert_kernels/build.py kernels/csrc/*"
# shellcheck disable=SC2086
key=$(cat $sources | sha256sum | cut -c1-16)
folder=$1
NEEDED_GIB=20

free=$(($(df --output=avail -BM "$folder" | tail -1 | tr -dc 0-9) / 1024))
if [ "$free" -lt "$NEEDED_GIB" ]; then
    echo "$folder has $free GiB free, and the gpu flavour's image takes $NEEDED_GIB to build." >&2
    echo "fix: TMPDIR=FOLDER on a larger disk" >&2
    exit 1
fi

found() {
    local one
    for one in python3.12 "$HOME"/.pyenv/versions/3.12.*/bin/python3.12; do
        "$one" -c 'import sys; print(sys.base_prefix)' 2>/dev/null && return
    done
}
python312=${PYTHON312:-$(found)}
if [ -z "$python312" ] || [ "$python312" = /usr ]; then
    echo "no Python 3.12 in a folder of its own, which the gpu flavour's pins are of." >&2
    echo "fix: pyenv install 3.12, or PYTHON312=FOLDER" >&2
    exit 1
fi
mkdir "$folder/python312"
cp -r "$python312/." "$folder/python312/"
rm -rf "$folder"/python312/lib/python3.12/{test,site-packages/*/tests}
export APPLIANCE_BASE_IMAGE=local/python:gpu
docker build -q --network host --build-arg BASE_IMAGE=local/python:ci -t local/python:gpu \
    -f image/tests/python312.Dockerfile "$folder/python312"

if [ ! -f image/kernels/libexpert_kernels.so ]; then
    if [ ! -f "$cache/$key/libexpert_kernels.so" ]; then
        echo "no kernels of these sources yet: compiling them once, for sm_90"
        time make kernels NETWORK=host ARCHITECTURES=9.0
        rm -rf "${cache:?}" && mkdir -p "$cache" # those of the sources before these
        cp -r image/kernels "$cache/.new" && mv "$cache/.new" "$cache/$key"
    else
        cp -r "$cache/$key/." image/kernels/
    fi
fi
cat image/kernels/build.json

echo "building the gpu flavour with kernels from the cache stage"
export APPLIANCE_IMAGE=moe-appliance:gpu
time docker build --network host --build-arg FLAVOUR=gpu --build-arg KERNELS=cache \
    --build-arg PIP_NO_CACHE_DIR=1 --build-arg BASE_IMAGE=$APPLIANCE_BASE_IMAGE \
    -t $APPLIANCE_IMAGE --progress plain . >"$folder/build.log" 2>&1 ||
    { tail -40 "$folder/build.log" >&2; exit 1; }
docker image ls
.venv/bin/pytest -q -s image/tests/test_gpu_image.py image/tests/test_gpu_launch.py
