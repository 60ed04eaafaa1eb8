"""Every command of docs/recipes.md, run in order with a tiny model on two processes of this CPU.

python -m pytest -s -m soak tests/end_to_end/test_recipes.py    # prints what was run
"""

import json
import time
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
    r"--batch_tokens 524288": "--batch_tokens 512",
    r"--total_tokens [13]B": "--total_tokens 20k --batch_tokens 512",  # enough to learn something
    r"\b(\d+)B\b": r"\1k",
    r"\b(\d+)M\b": r"\1",
    r"(interval |@|:)(\d+)000\b": r"\1\2",
    r"^deepspeed ": "deepspeed --num_gpus 2 --master_port {port} ",
}


def write_corpus(directory: Path) -> None:
    """Write text of three kinds: different thirds of Python's manual."""
    texts = paragraphs()
    for number, name in enumerate(("web", "code", "domain")):
        path = directory / "corpus" / name / "part.jsonl"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"\n".join(orjson.dumps({"text": text}) for text in texts[number::3]))


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_recipes_run_from_top_to_bottom(tmp_path, capsys) -> None:
    link_project(tmp_path)
    write_corpus(tmp_path)
    shown = [each.line for each in commands(ROOT / "docs" / "recipes.md") if "/" in each.line]
    for line in shown:
        start = time.monotonic()
        small = changed(line, CHANGES, tmp_path)
        run(small, tmp_path)
        with capsys.disabled():
            print(f"\nran in {time.monotonic() - start:4.1f} s: {small}", end="")

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
