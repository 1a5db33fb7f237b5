#!/bin/bash
# A Kubernetes node of our own on the Docker engine of engine.sh: node.sh start|stop FOLDER
# KUBE: a folder with kube-apiserver, -controller-manager, -scheduler, -proxy and kubelet, built as
# MOE_APPLIANCE_SHARED/tools/k8s/README.md says. Two fake GPUs; services and names work as elsewhere.
# Packages: etcd-server dnsmasq-base conntrack. Afterwards: export KUBECONFIG=FOLDER/node/kubeconfig
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
tools=${MOE_APPLIANCE_SHARED:-$root/../shared}/tools
folder=$(realpath "${2:?node.sh start|stop FOLDER}")
node=$folder/node
python=${PYTHON:-python3}
sysctls="vm.overcommit_memory kernel.panic kernel.panic_on_oops net.netfilter.nf_conntrack_max"

background() {
    local name=$1
    shift
    cd "$node"
    setsid nohup "$@" >"$name.log" 2>&1 &
    echo $! >"$node/$name.pid"
}

start() {
    mkdir -p "$node/hosts"
    ln -sf "${KUBE:?the folder of Kubernetes binaries}"/kube* "$node/"
    for name in $sysctls; do sysctl -n "$name" >"$node/$name.sysctl" 2>/dev/null || true; done
    export DOCKER_HOST=unix://$folder/docker.sock
    gcc -static -O -o "$node/pause" "$tools/k8s/pause.c"
    tar -C "$node" -c pause | docker import -c 'ENTRYPOINT ["/pause"]' - local/pause:1 >/dev/null
    # Pods find services by name: what the usual cluster's DNS does.
    sed 's/^registerNode: true/&\nclusterDNS: [172.17.0.1]\nclusterDomain: cluster.local/' \
        "$tools/k8s/up2.sh" >"$node/up2.sh"
    K8S_DIR=$node DOCKER_ROOT=$folder bash "$node/up2.sh"
    background proxy ./kube-proxy --kubeconfig=kubeconfig --hostname-override=vm --masquerade-all \
        --proxy-mode=iptables --conntrack-max-per-core=0
    # As root: the folder is nobody else's to read.
    background dns dnsmasq --user=root --keep-in-foreground --no-resolv --no-hosts --hostsdir="$node/hosts" \
        --listen-address=172.17.0.1 --bind-interfaces --port=53
    mkdir -p "$node/plugin"
    cp "$tools"/k8s/dp_pb2*.py "$node/plugin/"
    mkdir -p "$folder/nvml" && cp "$folder/libnvidia-ml.so.1" "$folder/nvml/"
    cp "$tools/two-rtx-pro-6000.nvml.txt" "$folder/nvml/two-6000.txt"
    sed "s#\${SCRATCH}#$folder#g" "$tools/k8s/plugin.py" >"$node/plugin/plugin.py"
    background plugin "$python" "$node/plugin/plugin.py"
}

stop() {
    [ -d "$node" ] || return 0
    for name in plugin dns proxy kubelet sched kcm api etcd; do
        [ -f "$node/$name.pid" ] && kill "$(cat "$node/$name.pid")" 2>/dev/null || true
    done
    sleep 2
    DOCKER_HOST=unix://$folder/docker.sock docker ps -aq --filter name=k8s_ |
        xargs -r docker -H "unix://$folder/docker.sock" rm -f >/dev/null
    awk '$2 ~ "/node/kl" {print $2}' /proc/mounts | xargs -r umount -l
    # Kubelet's and proxy's own chains; engine.sh puts back the rules that were there before.
    for table in mangle nat filter; do
        chains=$(iptables -t $table -S | sed -n 's/^-N \(KUBE-[A-Z0-9-]*\)$/\1/p')
        for chain in $chains; do iptables -t $table -F "$chain"; done
        iptables-save -t $table | grep -v -- ' KUBE-\|-j KUBE-' | iptables-restore -T $table || true
        for chain in $chains; do iptables -t $table -X "$chain" 2>/dev/null || true; done
    done
    for name in $sysctls; do
        [ -s "$node/$name.sysctl" ] && sysctl -qw "$name=$(cat "$node/$name.sysctl")" || true
    done
}

"$1"
