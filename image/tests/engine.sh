#!/bin/bash
# A Docker engine of our own for the image's tests, ended by its pid file:
# engine.sh start|stop FOLDER [bridge]. Without a bridge it changes nothing of the host's network:
# images are then built with --network host, and containers have none.
# Uses the tools of the folder of real inputs (MOE_APPLIANCE_SHARED): the engine's packages, a base
# image without a registry, limits clamped to ours, two fake cards.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
tools=${MOE_APPLIANCE_SHARED:-$root/../shared}/tools
folder=${2:?engine.sh start|stop FOLDER}
bridge=${3:-}
socket=unix://$folder/docker.sock
own=appliance-ci
alone=(--bridge=none --iptables=false --ip6tables=false --ip-forward=false)

start() {
    mkdir -p "$folder/hook"
    command -v dockerd >/dev/null || "$tools/install-engine.sh"
    cp "$tools/nvidia-container-runtime-hook" "$folder/hook/"
    chmod +x "$folder/hook/nvidia-container-runtime-hook"
    # The header that the fake NVML is compiled with comes from NVIDIA's own wheel.
    python3 -m pip download -q --no-deps -d "$folder/nvml" nvidia-nvml-dev
    python3 -m zipfile -e "$folder"/nvml/*.whl "$folder/nvml"
    gcc -shared -fPIC -o "$folder/libnvidia-ml.so.1" -I"$(dirname "$(find "$folder/nvml" -name nvml.h)")" "$tools/fake_nvml.c"
    if [ "$bridge" ]; then
        # Ports are published and names resolve as everywhere else; `stop` puts back what was.
        alone=()
        sysctl -n net.ipv4.ip_forward >"$folder/ip_forward"
        iptables-save >"$folder/rules"
        # Somebody else's engine may have the bridge: it is then theirs to remove.
        ip link show docker0 >/dev/null 2>&1 && touch "$folder/bridge-was-there"
    fi
    if [ -z "$bridge" ] && [ -e /sys/class/net/docker0 ]; then
        # dockerd without a bridge removes docker0, whosever it is: one of our own keeps it from that.
        ip link add "$own" type bridge
        ip address add 169.254.77.1/30 dev "$own" # link-local: no route of the host goes there
        alone=(--bridge="$own" "${alone[@]:1}")
    fi
    FAKE_NVML_LIB=$folder/libnvidia-ml.so.1 FAKE_NVML_FILE=$tools/two-rtx-pro-6000.nvml.txt \
    PATH=$folder/hook:/usr/sbin:$PATH \
    setsid nohup dockerd --data-root "$folder/data" --exec-root "$folder/exec" --pidfile "$folder/dockerd.pid" \
        "${alone[@]}" -H "$socket" --add-runtime ci="$tools/runc-ci" --default-runtime ci >"$folder/dockerd.log" 2>&1 &
    echo $! >"$folder/pid"
    for _ in $(seq 1 150); do
        docker -H "$socket" info >/dev/null 2>&1 && return 0
        sleep 0.2
    done
    tail -20 "$folder/dockerd.log" >&2
    return 1
}

stop() {
    [ -f "$folder/pid" ] || return 0
    # An engine that does not answer is ended all the same, and what it changed put back.
    docker -H "$socket" ps -aq | xargs -r docker -H "$socket" rm -f >/dev/null || true
    kill "$(cat "$folder/pid")" 2>/dev/null || true
    for _ in $(seq 1 100); do
        kill -0 "$(cat "$folder/pid")" 2>/dev/null || break
        sleep 0.2
    done
    ip link delete "$own" 2>/dev/null || true
    if [ -f "$folder/rules" ]; then
        # dockerd turns forwarding on, adds rules, and leaves both.
        iptables-restore <"$folder/rules" || true
        sysctl -qw net.ipv4.ip_forward="$(cat "$folder/ip_forward")" || true
        [ -f "$folder/bridge-was-there" ] || ip link delete docker0 2>/dev/null || true
    fi
    rm -f "$folder/pid"
}

"$1"
