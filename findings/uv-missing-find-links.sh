#!/usr/bin/env bash
# uv 0.13.9 with pip 26.2: a directory of --find-links that does not exist is a warning for pip, which
# installs from the index, and an error for uv, which installs nothing.
# Seen: uv 2, pip 0: Failed to read `--find-links` directory
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q pip==26.2 uv==0.13.9
codes=()
for installer in "$folder/venv/bin/uv pip" "$folder/venv/bin/python -m pip"; do
    code=0
    VIRTUAL_ENV=$folder/venv $installer install --find-links "$folder/missing" six==1.17.0 \
        >>"$folder/log" 2>&1 || code=$?
    codes+=("$code")
done
echo "uv ${codes[0]}, pip ${codes[1]}: $(grep -o 'Failed to read.*directory' "$folder/log")"
[[ ${codes[0]} != 0 && ${codes[1]} == 0 ]]
