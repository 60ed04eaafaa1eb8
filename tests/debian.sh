#!/usr/bin/env bash
# Run a command in a clone of this checkout on a fresh Debian with its own Python and compiler.
#
#   bash tests/debian.sh sid DIRECTORY 'bash launch/demo.sh'    # sid: Python 3.14, trixie: 3.13
#
# Needs root and debootstrap. DIRECTORY (1.5 GB, 9 with .venv) is made once. All mounts are in a
# namespace of their own, which ends with this script, however it ends.
set -euo pipefail
if [[ ${IN_OWN_NAMESPACE:-} != yes ]]; then
    exec env IN_OWN_NAMESPACE=yes unshare --mount --pid --fork --kill-child bash "$0" "$@"
fi
suite=$1 root=$(realpath -m "$2") command=$3
project=$(git -C "$(dirname "${BASH_SOURCE[0]}")" rev-parse --show-toplevel)
PATH=$PATH:/usr/sbin:/sbin
packages=python3,python3-dev,python3-venv,python3-psutil,g++,git,ca-certificates,procps
if [[ ! -e $root.made ]]; then
    debootstrap --variant=minbase --include=$packages "$suite" "$root" >"$root.log" 2>&1 ||
        { tail -n 3 "$root.log" >&2 && exit 1; }
    touch "$root.made"
fi
mount -t proc proc "$root/proc"
for each in dev dev/shm dev/pts sys; do mount --bind "/$each" "$root/$each"; done
for each in etc/resolv.conf etc/ssl/certs/ca-certificates.crt etc/pip.conf; do
    [[ ! -e /$each ]] || cp -L "/$each" "$root/$each"
done
rm -rf "$root/srv/project"
git clone -q "file://$project" "$root/srv/project"
certificates=/etc/ssl/certs/ca-certificates.crt
# Only what a fresh machine has: a variable such as PIP_FIND_LINKS must not get there.
env -i HOME=/srv PATH=/usr/local/bin:/usr/bin:/bin LANG=C.UTF-8 \
    SSL_CERT_FILE=$certificates PIP_CERT=$certificates \
    ${https_proxy:+https_proxy="$https_proxy"} ${http_proxy:+http_proxy="$http_proxy"} \
    "$(command -v chroot)" "$root" bash -c "cd /srv/project && $command"
