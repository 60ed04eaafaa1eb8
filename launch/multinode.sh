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

problems=()
[[ $num_nodes =~ ^[1-9][0-9]*$ ]] ||
    problems+=("NUM_NODES: $num_nodes is not a number of hosts.")
if [[ ! -r $hostfile ]]; then
    problems+=("$hostfile: cannot be read. Copy launch/hostfile.example and list your hosts.")
else
    hosts=() number=0
    while read -r host slots rest || [[ -n $host ]]; do
        number=$((number + 1))
        [[ -z $host || $host == \#* ]] && continue
        [[ $slots =~ ^slots=[1-9][0-9]*$ && ($rest == '' || $rest == \#*) ]] ||
            problems+=("$hostfile: line $number: $host is not followed by slots=N only.")
        [[ " ${hosts[*]:-} " != *" $host "* ]] ||
            problems+=("$hostfile: line $number: $host is listed twice. Remove one line.")
        hosts+=("$host")
    done <"$hostfile"
    [[ ! $num_nodes =~ ^[1-9][0-9]*$ || ${#hosts[@]} -ge $num_nodes ]] ||
        problems+=("$hostfile: ${#hosts[@]} hosts, NUM_NODES is $num_nodes. Add hosts, or request fewer.")
fi
[[ -x $root/.venv/bin/deepspeed ]] ||
    problems+=("$root/.venv: not set up. Run: bash launch/setup.sh")
command -v pdsh >/dev/null ||
    problems+=("pdsh: not installed; deepspeed needs it to reach the hosts: apt-get install pdsh")
# deepspeed copies this file onto the command line of ssh, which every user of the hosts can read.
for file in "${HOME:-/nowhere}/.deepspeed_env" .deepspeed_env; do
    if [[ -r $file ]] && names=$(grep -ioE '^[a-z_]*(key|token|secret|password)[a-z_]*=' "$file"); then
        problems+=("$file: ${names%%=*}: secrets must not be in it. Run wandb login on the first host instead.")
    fi
done
[[ ${#problems[@]} == 0 ]] || refuse "${problems[@]}"

exec "$root/.venv/bin/deepspeed" --hostfile "$hostfile" --num_nodes "$num_nodes" \
    "$root/pretrain.py" "$@"
