#!/usr/bin/env bash
# wandb 0.31.0: a variable's name is WANDB_ and the name of a setting, which is not always that of
# the argument of wandb.init. `group=` is WANDB_RUN_GROUP, and WANDB_GROUP is ignored without a
# word; the undocumented WANDB_RUN_NAME works like WANDB_NAME; WANDB_TAGS is split at commas only.
# Seen: WANDB_GROUP: group None; WANDB_RUN_GROUP: group seeds; name first; tags ('a', ' b')
set -euo pipefail
directory=$(mktemp -d)
trap 'rm -rf "$directory"' EXIT
python3 -m venv "$directory/venv"
"$directory/venv/bin/pip" install -q wandb==0.31.0
cd "$directory"
HOME=$directory WANDB_SILENT=true WANDB_ERROR_REPORTING=false "$directory/venv/bin/python" - <<'P'
import sys

import wandb


def settings(**variables):
    read = wandb.Settings(mode="offline")
    read.update_from_env_vars(variables)
    return read


found = [
    ("group", settings(WANDB_GROUP="seeds").run_group),
    ("group", settings(WANDB_RUN_GROUP="seeds").run_group),
    ("name", settings(WANDB_RUN_NAME="first").run_name),
    ("tags", settings(WANDB_TAGS="a, b").run_tags),
]
for line in found:
    print(*line)
sys.exit([value for _, value in found] != [None, "seeds", "first", ("a", " b")])
P
