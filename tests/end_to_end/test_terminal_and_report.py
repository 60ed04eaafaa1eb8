"""A run in a terminal: its progress bar, its HTML report, and `zerolm status`."""

import json
import os
import pty
import re

from tests.end_to_end.recipe import STEP_TOKENS, profile, recipe
from tests.launching import (
    LAUNCH_SECONDS,
    kill_session,
    rows,
    run_module,
    start_ranks,
    write_json,
)

STEPS = 30


def test_a_run_in_a_terminal_has_a_progress_bar_and_a_report(
    tmp_path, llama, corpus, held_out
) -> None:
    run, json_file = tmp_path / "run", profile(tmp_path / "ds.json", 2, bf16=False)
    write_json(json_file, {**json.loads(json_file.read_text()), "comms_logger": {"enabled": 1}})
    flags = recipe(llama, corpus, run, json_file, STEPS, 2)
    flags += ["--val_data", held_out, "--eval_interval", 15, "--wandb", "off"]
    flags += ["--checkpoint_interval", 10, "--report_interval", "1s"]
    leader, follower = pty.openpty()
    with open(follower, "w") as terminal:
        ranks = start_ranks(2, terminal, *flags, TERM="xterm")
    output = b""
    try:
        while part := os.read(leader, 1 << 16):
            output += part
    except OSError:  # Linux: the other end is closed
        pass
    finally:
        codes = ranks.codes(timeout=LAUNCH_SECONDS)
        kill_session(ranks.session)
    text = output.decode(errors="replace")
    assert codes and not any(code for _, code in codes), text[-4000:]
    bars = re.findall(r"step (\d+)/30 +(\d+)% ", text)
    assert bars and bars[-1] == ("30", "100"), text[-2000:]
    assert re.search(r"% [█ ▏▎▍▌▋▊▉]+ loss \d\.\d{4} \| ", text)
    for message in ("checkpoint=step-00000010", "eval_loss=", f"done: {STEPS} steps"):
        line = next(line for line in re.split(r"[\r\n]+", text) if message in line)
        assert "█" not in line, "complete lines, above the bar"
    assert "tok/s=" not in text, "no plain log lines with the bar"
    assert "comms_logger: its table is printed at the end of the run" in text
    assert "all_reduce" in text.partition("Comm. Op")[2], "the table of comms_logger"

    losses = rows(run, "train/loss")
    embedded = re.search(r'id="data">(.*?)</script>', (run / "report.html").read_text(), re.DOTALL)
    assert embedded is not None
    (shown_run,) = json.loads(embedded[1])["runs"]
    curves = shown_run["curves"]
    curve = curves["curves"]["train/loss"]
    steps = [curves["steps"][place] for place in curves["places"][curve["lines"]]]
    assert dict(zip(steps, curve["values"], strict=True)) == {
        step: float(f"{loss:.7g}") for step, loss in losses.items()
    }
    assert shown_run["state"] == "done" and shown_run["tokens"] == STEPS * STEP_TOKENS
    assert [row[0] for row in shown_run["evaluations"]["rows"]] == [15, 30]

    status = run_module("zerolm", "status", "--json", run)
    status_now = json.loads(status.stdout)
    summary = (status_now["state"], status_now["step"], status_now["ranks"]["count"])
    assert summary == ("done", STEPS, 2)
    assert status_now["checkpoint"] == "step-00000030"
