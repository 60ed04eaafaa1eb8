"""`report.html`: shows what the files contain, loads nothing, inserts no markup from a run."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.zerolm.report.run_directories import (
    STEP_TOKENS,
    loss_of,
    metrics,
    write_branch,
    write_heartbeats,
    write_lines,
    write_run,
)
from zerolm.common.errors import ConfigError
from zerolm.report import html as report
from zerolm.tracking import report_process

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&lt;!--\u2028\x00'\"`${7*7}"


def data_in(page: Path) -> dict:
    (found,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL
    )
    return json.loads(found)


def test_the_report_has_the_values_of_the_metrics(tmp_path) -> None:
    run = write_run(tmp_path / "run")
    page = report.write_report([run])
    assert page == run / "report.html"
    (found,) = data_in(page)["runs"]
    curves = found["curves"]
    for key in ("train/loss", "eval/loss", "data/web/loss", "throughput/mfu"):
        one = curves["curves"][key]
        places = curves["places"][one["lines"]]
        assert len(places) == len(one["values"])
        rows = [row for row in metrics(40, spike=30) if key in row]
        assert [curves["steps"][place] for place in places] == [row["step"] for row in rows]
        assert [curves["tokens"][place] for place in places] == [row["tokens"] for row in rows]
        assert one["values"] == pytest.approx([row[key] for row in rows], rel=1e-6)
    assert found["state"] == "done" and found["clipping"] == 1.0
    marks = {event["kind"]: event for event in found["events"]}
    assert {"start", "checkpoint", "stopped", "resume", "spike", "done"} == set(marks)
    assert marks["spike"]["tokens"] == 30 * STEP_TOKENS and marks["resume"]["step"] == 20
    assert "not applied" in marks["spike"]["words"]
    assert found["evaluations"]["rows"][0][:3] == [10, 10_000, 2.9]
    (prompt,) = found["samples"]
    assert [text[2] for text in prompt["texts"]] == [
        f" a time, {step}" for step in (10, 20, 30, 40)
    ]


def test_the_head_names_hardware_versions_and_the_page_on_w_and_b(tmp_path) -> None:
    run = write_run(tmp_path / "run")
    record = json.loads((run / "run.json").read_text())
    record |= {"device": "Fast GPU", "host": "node-1", "host_cores": 8, "host_memory_bytes": 2**34}
    record |= {"versions": {"python": "3.12.1", "torch": "2.13.0", "datasets": "4.0", "CUDA": "13"}}
    (run / "run.json").write_text(json.dumps(record))
    write_heartbeats(run)
    (run / "wandb").mkdir()
    state = {"id": "abc", "url": "https://wandb.example/team/zerolm/runs/abc"}
    (run / "wandb/run.json").write_text(json.dumps(state))
    facts = dict(data_in(report.write_report([run]))["runs"][0]["facts"])
    assert facts["hardware"] == "Fast GPU, node-1, 8 cores, 16 GiB"
    assert facts["versions"] == "torch 2.13.0, CUDA 13, python 3.12.1"
    assert facts["W&B"] == state["url"]


def test_text_of_a_run_is_never_markup(tmp_path) -> None:
    run = write_run(tmp_path / "run <b>", wandb_group=EVIL)
    write_lines(
        run / "samples.jsonl",
        [{"step": 1, "tokens": 1, "prompt_number": 0, "prompt": EVIL, "text": EVIL}],
    )
    events = [{"event": EVIL, "step": 3}, {"event": "failed", "step": 3, "reason": EVIL}]
    write_lines(run / "events.jsonl", events)
    rows = metrics(3) + [{"step": 4, "tokens": 4000, f"data/{EVIL}/loss": 2.0}]
    write_lines(run / "metrics.jsonl", rows)
    page = report.write_report([run], tmp_path / "page.html")
    text = page.read_text()
    assert "alert(1)<" not in text and "onerror=alert(2)>" not in text
    assert text.count("</script>") == text.count("<script") == 2
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL)
    assert data is not None and not re.search(r"[<>&\u2028]", data[1])
    (found,) = data_in(page)["runs"]
    assert found["samples"][0]["prompt"] == EVIL and found["events"][1]["words"] == EVIL


def test_the_report_loads_nothing_external(tmp_path) -> None:
    text = report.write_report([write_run(tmp_path / "run")]).read_text()
    for pattern in (r"https?:", r"\bsrc=", r"\bhref=", r"url\((?!#)", r"@import", r"\bfetch\(",
                    "XMLHttpRequest", "WebSocket", "innerHTML", "outerHTML", "insertAdjacentHTML",
                    r"document\.write", r"\beval\(", "<link", "<iframe"):  # fmt: skip
        assert not re.search(pattern, text), pattern
    assert "default-src 'none'" in text and "unsafe" not in text


@pytest.mark.soak  # always: test_curves.py
def test_a_long_run_gives_a_report_of_some_megabytes_that_shows_its_spike(tmp_path) -> None:
    num_steps = 100_000
    keys = [f"train/param_norm/layers.{layer}" for layer in range(24)]
    with open(tmp_path / "metrics.jsonl", "w") as file:
        for step in range(1, num_steps + 1):
            loss = 77.5 if step == 76_543 else loss_of(step)
            row = {"step": step, "tokens": step * STEP_TOKENS, "train/loss": loss}
            row |= dict.fromkeys(keys, step / 3) if step % 10 == 0 else {}
            file.write(json.dumps(row) + "\n")
    page = report.write_report([tmp_path])
    (found,) = data_in(page)["runs"]
    assert max(found["curves"]["curves"]["train/loss"]["values"]) == 77.5
    assert page.stat().st_size < 4e6


def test_runs_are_compared_by_settings_and_losses(tmp_path) -> None:
    one = write_run(tmp_path / "one", seed=0)
    two = write_run(tmp_path / "two", seed=1)
    rows = metrics(40, spike=30)
    rows[11]["train/loss"] += 0.25
    write_lines(two / "metrics.jsonl", rows)
    data = data_in(report.write_report([one, two], tmp_path / "page.html"))
    assert {row["key"] for row in data["differences"]} == {"settings.seed", "settings.run_dir"}
    (agreement,) = data["agreement"]
    assert agreement["largest"] == pytest.approx(0.25) and agreement["steps"] == 40
    with pytest.raises(ConfigError):
        report.write_report([one, tmp_path / "absent"], tmp_path / "no.html")
    assert not (tmp_path / "no.html").exists()


def test_a_branch_is_drawn_alone_from_step_1_and_beside_its_trunk_from_its_branch_point(
    tmp_path,
) -> None:
    trunk = write_run(tmp_path / "trunk")
    first = write_branch(tmp_path / "first", trunk, 20)
    second = write_branch(tmp_path / "second", first, 30)

    def steps(run: dict) -> tuple[int, int]:
        curves = run["curves"]
        places = curves["places"][curves["curves"]["train/loss"]["lines"]]
        return curves["steps"][places[0]], curves["steps"][places[-1]]

    (alone,) = data_in(report.write_report([second]))["runs"]
    assert steps(alone) == (1, 40)
    assert ["branch", "of first at step 30, of trunk at step 20"] in alone["facts"]
    (trained,) = [value for name, value, _ in alone["figures"] if name == "Trained"]
    assert trained == "5s", "ten steps of its own"
    together = data_in(report.write_report([trunk, first, second]))["runs"]
    assert [steps(run) for run in together] == [(1, 40), (20, 40), (30, 40)]
    names = {run["name"]: run["figures"][-1][:2] for run in together[1:]}
    assert names["first"] == ["Branch of", "trunk at step 20"]
    left_out = data_in(report.write_report([trunk, second]))["runs"]
    assert [steps(run) for run in left_out] == [(1, 40), (20, 40)], "it left the trunk at 20"
    marks = [event for run in together for event in run["events"] if event["kind"] == "branched"]
    assert [(event["step"], event["level"]) for event in marks] == [
        (20, "notable"),
        (30, "notable"),
    ]


def test_unknown_metrics_and_events_are_shown(tmp_path) -> None:
    run = write_run(tmp_path / "run")
    rows = [{**row, "train/new": 1.0} for row in metrics(40)]
    write_lines(run / "metrics.jsonl", rows)
    write_lines(run / "events.jsonl", [{"event": "gpu_throttled", "step": 3, "celsius": 95}])
    data = data_in(report.write_report([run]))
    assert data["panels"][-1]["keys"] == ["train/new"]
    assert data["panels"][-1]["title"] == "train/new"
    (event,) = data["runs"][0]["events"]
    assert (event["kind"], event["level"], event["words"]) == (
        "gpu_throttled", "plain", "celsius: 95"
    )  # fmt: skip


@pytest.mark.parametrize(("noise_scale", "varies"), [(True, True), (False, True), (False, False)])
def test_batch_size_is_drawn_if_it_varies_or_with_the_noise_scale(
    tmp_path, noise_scale, varies
) -> None:
    rows = [
        {"step": step, "tokens": step, "train/batch_tokens": 8 + step * varies}
        | ({"train/noise_scale_tokens": 9.0} if noise_scale else {})
        for step in range(1, 9)
    ]
    write_lines(tmp_path / "metrics.jsonl", rows)
    titles = [panel["title"] for panel in data_in(report.write_report([tmp_path]))["panels"]]
    assert titles == (["Gradient noise scale"] if noise_scale else ["Batch"] * varies)


@pytest.mark.parametrize("damage", ["empty", "half", "no run.json", "no metrics"])
def test_the_report_of_a_damaged_run_lists_the_damage(tmp_path, damage) -> None:
    run = write_run(tmp_path / "run")
    if damage == "empty":
        for path in run.iterdir():
            path.write_text("")
    elif damage == "half":
        for path in run.iterdir():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        (run / {"no run.json": "run.json"}.get(damage, "metrics.jsonl")).unlink()
    (found,) = data_in(report.write_report([run]))["runs"]
    assert bool(found["problems"]) == (damage != "no metrics")
    assert not any("None" in text for figure in found["figures"] for text in figure)


def test_a_run_waits_for_its_report_only_at_the_end(tmp_path) -> None:
    run = write_run(tmp_path / "run")
    page = report_process.HtmlReport(run, interval=600.0, active=True)
    page.tick()
    assert not page._child.running, "not yet"
    page.finish()
    assert data_in(run / "report.html")["runs"][0]["state"] == "done"
    off = report_process.HtmlReport(tmp_path / "absent", interval=0.0, active=True)
    off.tick()
    off.finish()


def test_the_end_of_a_report_is_noticed_long_before_the_next_one_is_due(tmp_path) -> None:
    """Otherwise its duration would be the interval, and the next report 20 intervals later."""
    page = report_process.HtmlReport(write_run(tmp_path / "run"), interval=600.0, active=True)
    page._write_at, deadline = 0.0, time.monotonic() + 300
    page.tick()
    while page._child.running:
        assert time.monotonic() < deadline
        time.sleep(0.01)
        page.tick()
    assert 0 < page._last_seconds < 300 and page._write_at < time.monotonic() + 20 * 300


def test_a_report_process_that_hangs_does_not_delay_the_run(tmp_path, monkeypatch) -> None:
    run = write_run(tmp_path / "run")
    os.mkfifo(run / "metrics-rolled-back-0001.jsonl")  # its reader waits forever
    monkeypatch.setattr(report_process, "FINISH_SECONDS", 1.0)
    page = report_process.HtmlReport(run, interval=1e-3, active=True)
    while not page._child.running:
        page.tick()
    process = page._child.process
    for _ in range(1000):
        page.tick()
    assert page._child.process is process and process.poll() is None, "one, and nobody waits"
    page.finish()
    assert process.poll() is not None and not page._child.running, "and none stays"


def test_the_supervisor_writes_the_report_of_a_killed_run(tmp_path) -> None:
    for number, interval in enumerate((180.0, 0.0)):
        run = write_run(tmp_path / f"run{number}", report_interval=interval)
        page = report_process.start_for(run)
        assert (page is not None) == bool(interval)
        assert page is None or page.wait(time.monotonic() + 60) == 0
        assert (run / "report.html").exists() == bool(interval)
    assert report_process.start_for(tmp_path / "absent") is None


def test_a_report_that_cannot_be_written_does_not_end_the_run(tmp_path, capfd) -> None:
    page = report_process.HtmlReport(tmp_path / "absent", interval=600.0, active=True)
    page.finish()
    assert "was not updated" in capfd.readouterr().out


def test_the_report_process_ends_with_its_run(tmp_path) -> None:
    run = write_run(tmp_path / "run")
    words = [sys.executable, "-m", "zerolm", "report", str(run), "--of_process"]
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([*sys.argv[1:], str(os.getpid())], stdout=subprocess.DEVNULL)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(2)"
    )
    line = '{"step": 1, "tokens": 1}\n'  # so many that reading them takes many seconds
    (run / "metrics-rolled-back-0001.jsonl").write_text(line * 2_000_000)
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=True,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while Path("/proc", done.stdout.strip()).exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not Path("/proc", done.stdout.strip()).exists() and not (run / "report.html").exists()


def test_an_output_that_cannot_be_written_is_refused(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        report.write_report([write_run(tmp_path / "run")], tmp_path / "file" / "page.html")
