"""A run that is looked at, started on a terminal: its bar, its page, and how it is from outside."""

import json
import os
import pty
import re
import subprocess
import sys

from recipe import STEP_TOKENS, profile, recipe

from tests.launching import LAUNCH_SECONDS, ROOT, command, environment, kill_session, rows

STEPS = 30


def test_a_run_on_a_terminal_has_a_bar_and_a_page(tmp_path, llama, corpus, held_out) -> None:
    run, json_file = tmp_path / "run", profile(tmp_path / "ds.json", 2, bf16=False)
    words = recipe(llama, corpus, run, json_file, STEPS, 2)
    words += ["--val_data", held_out, "--eval_interval", 15, "--wandb", "off"]
    words += ["--checkpoint_interval", 10, "--report_interval", "1s"]
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        command(2, *words),
        env=environment(TERM="xterm"), start_new_session=True,
        stdin=follower, stdout=follower, stderr=follower,
    )  # fmt: skip
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 1 << 16):
            shown += part
    except OSError:  # Linux: nobody has the other end any more
        pass
    finally:
        try:
            code = process.wait(timeout=LAUNCH_SECONDS)
        except subprocess.TimeoutExpired:
            kill_session(process.pid)
            raise
    text = shown.decode(errors="replace")
    assert code == 0, text[-4000:]
    bars = re.findall(r"step (\d+)/30 +(\d+)% ", text)
    assert bars and bars[-1] == ("30", "100"), text[-2000:]
    assert re.search(r"% [█ ▏▎▍▌▋▊▉]+ loss \d\.\d{4} \| ", text)
    for words_above in ("checkpoint=step-00000010", "eval_loss=", f"done: {STEPS} steps"):
        line = next(line for line in re.split(r"[\r\n]+", text) if words_above in line)
        assert "█" not in line, "whole lines, above the bar"
    assert "tok/s=" not in text, "no plain lines beside the bar"

    losses = rows(run, "train/loss")
    found = re.search(r'id="data">(.*?)</script>', (run / "report.html").read_text(), re.DOTALL)
    assert found is not None
    (shown_run,) = json.loads(found[1])["runs"]
    curves = shown_run["curves"]
    one = curves["curves"]["train/loss"]
    steps = [curves["steps"][place] for place in curves["places"][one["lines"]]]
    assert dict(zip(steps, one["values"], strict=True)) == {
        step: float(f"{loss:.7g}") for step, loss in losses.items()
    }
    assert shown_run["state"] == "done" and shown_run["tokens"] == STEPS * STEP_TOKENS
    assert [row[0] for row in shown_run["evaluations"]["rows"]] == [15, 30]

    status = subprocess.run(
        [sys.executable, "-m", "zerolm", "status", "--json", run],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    told = json.loads(status.stdout)
    assert (told["state"], told["step"], told["ranks"]["count"]) == ("done", STEPS, 2)
    assert told["checkpoint"] == "step-00000030"
