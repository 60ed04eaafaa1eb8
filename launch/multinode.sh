#!/usr/bin/env bash
# Start pretrain.py on several hosts, after checking the hostfile.
#
#   bash launch/multinode.sh HOSTFILE NUM_NODES [pretrain.py's flags]
#
# `deepspeed` itself starts on fewer hosts than it was asked for without a word, and so would train
# on fewer devices than you think. It needs pdsh, ssh without a password to every host, and this
# directory at the same path on each (launch/hostfile.example says how to write a hostfile).
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

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
    problems+=("$hostfile: cannot be read. Copy launch/hostfile.example and name your hosts.")
else
    hosts=() number=0
    while read -r host slots rest || [[ -n $host ]]; do
        number=$((number + 1))
        [[ -z $host || $host == \#* ]] && continue
        [[ $slots =~ ^slots=[1-9][0-9]*$ && ($rest == '' || $rest == \#*) ]] ||
            problems+=("$hostfile: line $number: $host is not followed by slots=N alone.")
        [[ " ${hosts[*]:-} " != *" $host "* ]] ||
            problems+=("$hostfile: line $number: $host is there twice. Give it one line.")
        hosts+=("$host")
    done <"$hostfile"
    [[ ! $num_nodes =~ ^[1-9][0-9]*$ || ${#hosts[@]} -ge $num_nodes ]] ||
        problems+=("$hostfile: ${#hosts[@]} hosts, --num_nodes is $num_nodes. Add hosts or ask for fewer.")
fi
[[ -x $here/.venv/bin/deepspeed ]] ||
    problems+=("$here/.venv: not set up. Run: bash launch/setup.sh")
command -v pdsh >/dev/null ||
    problems+=("pdsh: not installed, with which deepspeed reaches the hosts: apt-get install pdsh")
# deepspeed writes this file onto the command line of ssh, which everybody on the hosts can read.
for file in "${HOME:-/nowhere}/.deepspeed_env" .deepspeed_env; do
    if [[ -r $file ]] && names=$(grep -ioE '^[a-z_]*(key|token|secret|password)[a-z_]*=' "$file"); then
        problems+=("$file: ${names%%=*}: no secrets there. wandb login on the first host keeps its key.")
    fi
done
[[ ${#problems[@]} == 0 ]] || refuse "${problems[@]}"

exec "$here/.venv/bin/deepspeed" --hostfile "$hostfile" --num_nodes "$num_nodes" \
    "$here/pretrain.py" "$@"
