#!/usr/bin/env bash
# The first process of a host: tests/cluster/hosts.py starts it in namespaces of its own.
#
# host.sh NAME ADDRESS CLUSTER VISIBLE...    CLUSTER is the directory of the cluster; it and each
#                                            VISIBLE path stay visible, /tmp is the host's own.
set -euo pipefail
name=$1 address=$2 cluster=$3
shift 2
hostname "$name"
ip link set lo up

# What lies below /tmp must be kept somewhere else while /tmp is replaced.
mount -t tmpfs tmpfs /mnt
number=0
for path in "$@"; do
    number=$((number + 1))
    mkdir "/mnt/$number" && mount --rbind "$path" "/mnt/$number"
done
mount -t tmpfs -o size=256M tmpfs /tmp
number=0
for path in "$@"; do
    number=$((number + 1))
    if [[ $path == /tmp/* ]]; then
        mkdir -p "$path" && mount --rbind "/mnt/$number" "$path"
    fi
done
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd /run/munge
mount --bind "$cluster/hosts" /etc/hosts
mount --bind "$cluster/ssh" /etc/ssh
mount --bind "$cluster/slurm" /etc/slurm

for _ in {1..200}; do
    ip link show eth0 &>/dev/null && break
    sleep 0.05
done
ip addr add "$address/24" dev eth0
ip link set eth0 up
/usr/sbin/sshd -o ListenAddress="$address" -o PidFile=/run/sshd.pid
touch "$cluster/$name.ready"
trap 'exit 0' TERM
while true; do # bash collects the processes whose parents have ended
    sleep 60 &
    wait
done
