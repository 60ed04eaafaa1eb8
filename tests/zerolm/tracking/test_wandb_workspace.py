"""The W&B workspace has the panels of the report."""

import json

import pytest

from zerolm.common.errors import ConfigError
from zerolm.tracking.wandb_workspace import layout, make


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of that package's use of pydantic
def test_a_workspace_has_panels_for_the_runs_metrics(tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb_workspaces")
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    (tmp_path / "run.json").write_text(json.dumps({"settings": {"wandb_project": "mine"}}))
    row = {"step": 1, "tokens": 9, "train/loss": 2.0, "eval/loss": 3.0, "data/web/loss": 2.5}
    row |= {"train/grad_norm": 1.0, "train/perplexity": 7.4, "train/new": 1.0}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "samples.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match="no W&B key is configured"):
        make(tmp_path, None, "team")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    with pytest.raises(ConfigError, match="--entity: not given"):
        make(tmp_path, None, None)
    with pytest.raises(ConfigError, match=r"run\.json: no such file"):
        make(tmp_path / "other", None, None)
    bank = json.loads(make(tmp_path, None, None, print_only=True))["section"]["panelBankConfig"]
    panels = {
        (section["name"], panel["config"]["chartTitle"]): panel["config"]
        for section in bank["sections"] if section["name"] != "Samples"
        for panel in section["panels"]
    }  # fmt: skip
    assert {title: panel["metrics"] for title, panel in panels.items()} == {
        ("Loss", "Loss"): ["train/loss"],
        ("Loss", "Loss, evaluations"): ["eval/loss"],
        ("Loss", "Loss by source"): ["data/web/loss"],
        ("Optimization", "Gradient norm"): ["train/grad_norm"],
        ("Other", "train/new"): ["train/new"],
    }
    assert all(panel["xAxis"] == "tokens" for panel in panels.values())
    smooth = {title for (_, title), panel in panels.items() if "smoothingWeight" in panel}
    assert smooth == {"Loss", "Loss by source", "Gradient norm"}
    assert "Samples" in {section["name"] for section in bank["sections"]}
    assert layout({"train/loss"}, "mine", "team", "first: training").name == "first: training"
