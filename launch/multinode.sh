#!/usr/bin/env bash
# Check a hostfile, then start pretrain.py on several hosts.
#
#   bash launch/multinode.sh HOSTFILE NUM_NODES [pretrain.py's flags]
#
# Without this check, `deepspeed` starts on fewer hosts than requested and prints no warning. It needs
# pdsh, ssh without a password to every host, and this directory at the same path on each host
# (launch/hostfile.example shows the format of a hostfile).
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

refuse() {
    printf 'multinode.sh: refused, nothing was started.\n' >&2
    printf '%s\n' "$@" >&2
    exit 2
}

[[ $# -ge 2 ]] || refuse "usage: bash launch/multinode.sh HOSTFILE NUM_NODES [flags]"
hostfile=$1 num_nodes=$2
shift 2

python=$root/.venv/bin/python problems=()
if [[ ! -x $root/.venv/bin/deepspeed ]]; then
    problems+=("$root/.venv: not set up. Run: bash launch/setup.sh")
    python=python3
fi
found=$("$python" "$root/zerolm/run_module.py" launch.command.hosts \
    "$hostfile" "$num_nodes" "$@") || refuse "${problems[@]}"
[[ -z $found ]] || problems+=("$found")
command -v pdsh >/dev/null ||
    problems+=("pdsh: not installed; deepspeed needs it to reach the hosts: apt-get install pdsh")
[[ ${#problems[@]} == 0 ]] || refuse "${problems[@]}"

exec "$root/.venv/bin/zerolm" train --hostfile "$hostfile" --num_nodes "$num_nodes" "$@"
