"""Every command of docs/recipes.md, run in order with tiny models on two processes of this CPU.

python -m pytest -s -m soak tests/end_to_end/test_recipes.py    # prints what was run
"""

import json
import re
import time
from collections.abc import Sequence
from pathlib import Path

import orjson
import pytest

from tests import ROOT
from tests.documents import commands
from tests.end_to_end.document_commands import changed, link_project, run
from tests.texts import paragraphs
from zerolm.evaluate.validation import QUARTERS

# Tokens are a thousandth of a thousandth, steps a thousandth, so schedules keep their shape.
CHANGES = {
    r"--vocab_size 32000": "--vocab_size 1000",
    r"--val_fraction 0.0?01": "--val_fraction 0.1",
    r"seq_len 2048": "seq_len 64",
    r"--seq_len 512": "--seq_len 16",
    r"llama-160m.json": "tiny.json",
    r"moe-1.6b.json": "mixtral-tiny.json",
    r"model_configs/(llama-350m|llama-1.3b).json": r"tiny/\1.json",
    r": 1024/: 256/; s/: 2736/: 684/": ": 128/: 32/; s/: 344/: 86/",
    r": 1024/: 512/; s/: 2736/: 1368/": ": 128/: 64/; s/: 344/: 172/",
    r"--base_hidden_size 256 --base_layers 24": "--base_hidden_size 32 --base_layers 2",
    r"--set seed=0,1 ": "",
    r"--batch_tokens 524288": "--batch_tokens 512",
    r"--total_tokens [13]B": "--total_tokens 20k --batch_tokens 512",  # enough to learn something
    r"\b(\d+)B\b": r"\1k",
    r"\b(\d+)M\b": r"\1",
    r"(interval |@|:)(\d+)000\b": r"\1\2",
    r"^deepspeed ": "deepspeed --num_gpus 2 --master_port {port} ",
    r"^zerolm sweep ": "zerolm sweep --jobs 2 ",
}
# Hidden and intermediate size of models that must differ from each other, an eighth of their own.
TINY = {"llama-350m.json": (128, 344), "llama-1.3b.json": (256, 688)}


def write_tiny_configs(directory: Path) -> None:
    """Write configs in tiny/ with the heads and keys of those in model_configs/."""
    (directory / "tiny").mkdir()
    for name, (hidden, intermediate) in TINY.items():
        config = json.loads((ROOT / "model_configs" / name).read_text())
        config |= {"hidden_size": hidden, "intermediate_size": intermediate}
        config |= {"num_hidden_layers": 2, "vocab_size": 1024}
        (directory / "tiny" / name).write_text(json.dumps(config, indent=2))


def write_corpus(directory: Path) -> None:
    """Write text of three kinds: different thirds of the manual."""
    texts = paragraphs()
    for number, name in enumerate(("web", "code", "domain")):
        path = directory / "corpus" / name / "part.jsonl"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\n".join(orjson.dumps({"text": text}) for text in texts[number::3]))


def run_in_order(lines: Sequence[str], directory: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link_project(directory)
    write_corpus(directory)
    write_tiny_configs(directory)
    for line in lines:
        start = time.monotonic()
        small = changed(line, CHANGES, directory)
        run(small, directory)
        with capsys.disabled():
            print(f"\nran in {time.monotonic() - start:4.1f} s: {small}", end="")


SHOWN = [each.line for each in commands(ROOT / "docs" / "recipes.md") if "/" in each.line]
SMALL_RUNS = next(place for place, line in enumerate(SHOWN) if "width-256" in line)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_recipes_of_one_model_run_from_top_to_bottom(tmp_path, capsys) -> None:
    run_in_order(SHOWN[:SMALL_RUNS], tmp_path, capsys)

    def figures(name: str) -> dict[str, float]:
        return json.loads((tmp_path / name).read_text())["figures"]

    # Continued pretraining learns the domain, and the trunk's models predict better than chance.
    key = next(each for each in figures("after.json") if each.endswith("domain-val/bits_per_byte"))
    assert figures("after.json")[key] < figures("before.json")[key]
    for name in ("base.json", "decay.json", "merged.json"):
        found = [value for each, value in figures(name).items() if each.endswith("bits_per_byte")]
        assert found and all(0.5 < value < 8 for value in found), name
    # What a stage of longer sequences has taught is shown by position.
    quarters = [figures("positions.json")[f"loss_at_{part}_quarter"] for part in QUARTERS]
    assert all(0.5 < loss < 8 for loss in quarters) and "needle/acc" in figures("positions.json")
    assert "decay-code" in (tmp_path / "family.html").read_text()


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_recipes_of_small_runs_for_a_large_one_run_from_top_to_bottom(tmp_path, capsys) -> None:
    shards = [
        line for line in SHOWN[:SMALL_RUNS] if re.match(r"zerolm data .* corpus/(web|code) ", line)
    ]
    run_in_order([*shards, *SHOWN[SMALL_RUNS:]], tmp_path, capsys)
    rates, ladder = (
        json.loads((tmp_path / "runs" / name / "sweep.json").read_text())
        for name in ("rates", "ladder")
    )
    assert [*rates["optima"]] == ["model_config=width-256", "model_config=width-512"]
    assert [point["state"] for point in ladder["points"]] == ["done"] * 9
