#!/usr/bin/env bash
# The complete workflow on one machine, in minutes: text, tokenizer, token shards, a ZeRO-2 run on
# two processes that is stopped, resumed, and samples text, its HTML report, and a Hugging Face model
# directory.
#
#   bash launch/demo.sh
#
# The text is Python's own library and manual, so nothing is downloaded after .venv is set up. The
# demo runs on the CPU; its losses are the same on every machine with the same kind of CPU (others
# round products differently, and train in bf16 where it is native). Output goes to demo/, which is cleared first.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bash launch/setup.sh
SECONDS=0 # bash increments it every second
export PATH="$PWD/.venv/bin:$PATH"

# One thread per process: enough for such a small model, and reproducible on every machine.
export OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
readonly stopped_on_request=75 # exit code of pretrain.py: saved, start it again to resume
readonly run_dir=demo/runs/demo
readonly num_processes=2

title() {
    printf '\n== %s (%d s)\n' "$1" "$SECONDS"
}

# Print every twentieth step only; metrics.jsonl has all of them. DeepSpeed's launcher logs every exit
# code but 0 as an error, also that of a requested stop.
shorten() {
    awk -F '[=/ ]' '/^step=/ && / loss=/ && $2 != 1 && $2 % 20 { next }
        /\[ERROR\].* exits with return code = '$stopped_on_request'$/ { next }
        { print; fflush() }'
}

free_port() {
    python -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])'
}

pretrain() {
    deepspeed --log_level error --num_gpus $num_processes --master_port "$(free_port)" pretrain.py \
        --deepspeed_config ds_configs/zero2.json --model_config model_configs/demo.json \
        --data demo/shards/code=0.8 --data demo/shards/prose=0.2 \
        --val_data demo/shards/code-val --val_data demo/shards/prose-val \
        --seq_len 256 --batch_tokens 4096 --batch_ramp_start 2048 --batch_ramp_tokens 500k \
        --micro_batch_size 4 --total_tokens 500k \
        --learning_rate 5e-3 --warmup_tokens 20k --log_interval 1 --eval_interval 150 \
        --prompts demo/prompts.txt --sample_length 24 --temperature 0.7 \
        --wandb offline --run_dir $run_dir "$@" 2>&1 | shorten
}

mkdir -p demo
rm -rf demo/text demo/tokenizer demo/shards demo/runs demo/model demo/loss.png
printf '%s\n' 'import' 'def __init__(self' >demo/prompts.txt

title "Text: Python's library and manual"
python -m launch.demo.corpus demo/text

title "Tokenizer"
python -m data_prep train-tokenizer --input demo/text --vocab_size 4096 --output demo/tokenizer

title "Token shards"
for source in code prose; do
    python -m data_prep tokenize --input demo/text/$source.jsonl --tokenizer demo/tokenizer \
        --output demo/shards/$source --workers 2 \
        --val_fraction 0.05 --val_output demo/shards/$source-val
done

title "Train on $num_processes processes with ZeRO-2, and stop after half a minute"
code=0
pretrain --stop_after 30s || code=$?
if [[ $code == "$stopped_on_request" ]]; then
    echo "exit code $code: saved; the same command resumes the run"
    title "Resume with the same command"
    pretrain
elif [[ $code == 0 ]]; then
    echo "The run was done before it could be stopped."
else
    exit "$code"
fi

title "Model directory for Hugging Face's from_pretrained"
python -m zerolm export $run_dir demo/model

title "Loss curve"
python -m zerolm plot $run_dir --output demo/loss.png
python -m launch.demo.summary $run_dir
echo "plot          demo/loss.png"
echo "report        $run_dir/report.html"
echo "time          $SECONDS s"
