#!/bin/bash
# Boots a two-node guest under QEMU emulation and runs proof.py and tuning.py in it: real mbind, real
# per-node huge pages, real numa_maps, the real `appliance tune`. Not part of the default tests: it
# takes about two minutes.
#
#   boot.sh PYTHON SCRATCH
#
# PYTHON: an interpreter that has pydantic, typer and nvidia-ml-py. SCRATCH: a folder with room for 300 MB,
# its k/ the unpacked package of a Debian cloud kernel:
#   apt-get install qemu-system-x86 busybox-static cpio e2fsprogs
#   apt-get download linux-image-6.1.0-57-cloud-amd64 && dpkg-deb -x linux-image-*.deb SCRATCH/k
set -euo pipefail
python=$1 scratch=$2
here=$(cd "$(dirname "$0")" && pwd)
repository=$(cd "$here/../../.." && pwd)
cd "$scratch"
rm -rf root initrd root.img initrd.gz
mkdir -p root/{bin,dev,proc,sys,tmp,etc,repository} initrd/{bin,proc,sys,dev,newroot,m}

# The interpreter, the shared libraries it and its extensions load, the modules it needs.
real=$(readlink -f "$python")
stdlib=$("$python" -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')
mkdir -p "root$(dirname "$real")" "root$stdlib" root/site
cp "$real" "root$real"
tar -C "$stdlib" --exclude=site-packages --exclude=test --exclude=__pycache__ --exclude=idlelib \
    --exclude=tkinter --exclude=ensurepip --exclude='*.a' -c . | tar -C "root$stdlib" -x
"$python" - root/site <<'P'
import importlib, pathlib, shutil, sys
for name in ("pydantic", "pydantic_core", "annotated_types", "typing_extensions",
             "typing_inspection", "pynvml", "typer", "annotated_doc", "shellingham"):
    path = pathlib.Path(importlib.import_module(name).__file__)
    if path.name == "__init__.py":
        shutil.copytree(path.parent, pathlib.Path(sys.argv[1]) / name,
                        ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(path, sys.argv[1])
P
find root -name '*.so*' -o -path "root$real" | while read -r file; do ldd "$file" 2>/dev/null; done |
    awk '$3 ~ /^\// {print $3} $1 ~ /^\// {print $1}' | sort -u |
    while read -r library; do
        mkdir -p "root$(dirname "$library")"
        cp -L "$library" "root$library"
    done
cp -r "$repository/preflight" "$repository/appliance" root/repository/
cp "$here/proof.py" "$here/tuning.py" root/
PYTHONPATH="$repository:$repository/kernels" "$python" "$here/plan.py" root
cp "$(command -v busybox)" root/bin/busybox
cp "$(command -v busybox)" initrd/bin/busybox
cat > root/init <<G
#!/bin/busybox sh
/bin/busybox mount -t tmpfs t /tmp
/bin/busybox mount -t tmpfs e /etc
/bin/busybox mkdir -p /tmp/shm
/bin/busybox mkswap /dev/vdb && /bin/busybox swapon /dev/vdb
export PYTHONPATH=/site:/repository PYTHONDONTWRITEBYTECODE=1 HOME=/tmp PATH=/bin
"$real" /proof.py && "$real" /tuning.py
echo "GUEST-RC=\$?"
/bin/busybox poweroff -f
G
chmod +x root/init
version=$(ls k/lib/modules)
for module in virtio/virtio virtio/virtio_ring virtio/virtio_pci_modern_dev \
    virtio/virtio_pci_legacy_dev virtio/virtio_pci block/virtio_blk; do
    cp "k/lib/modules/$version/kernel/drivers/$module.ko" initrd/m/
done
cat > initrd/init <<'G'
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev
for m in virtio_ring virtio virtio_pci_modern_dev virtio_pci_legacy_dev virtio_pci virtio_blk; do
    insmod /m/$m.ko
done
i=0; while [ ! -b /dev/vda ] && [ $i -lt 100 ]; do sleep 0.1; i=$((i+1)); done
mount -t ext4 -o ro /dev/vda /newroot
mount --move /proc /newroot/proc; mount --move /sys /newroot/sys; mount --move /dev /newroot/dev
exec switch_root /newroot /init
G
chmod +x initrd/init
(cd initrd && find . | cpio -o -H newc --quiet | gzip -1 > ../initrd.gz)
mke2fs -q -t ext4 -O ^has_journal -d root root.img $(($(du -sm root | cut -f1) * 13 / 10 + 64))M
truncate -s 64M swap.img
timeout "${T:-600}" qemu-system-x86_64 -accel tcg,thread=multi -m 2048 -smp 4,sockets=2,cores=2 \
    -cpu max -object memory-backend-ram,id=m0,size=1024M -object memory-backend-ram,id=m1,size=1024M \
    -numa node,nodeid=0,cpus=0-1,memdev=m0 -numa node,nodeid=1,cpus=2-3,memdev=m1 \
    -numa dist,src=0,dst=1,val=21 -drive if=virtio,format=raw,file=root.img,snapshot=on \
    -drive if=virtio,format=raw,file=swap.img \
    -nographic -no-reboot -nodefaults -serial stdio -kernel k/boot/vmlinuz-* -initrd initrd.gz \
    -append "console=ttyS0 quiet panic=-1" | tee console.log
grep -q "GUEST-RC=0" console.log
