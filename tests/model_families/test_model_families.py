"""Every family of transformers has the outcome that is recorded and that docs/models.md states."""

import pytest

from tests.launching import run_module
from tests.model_families import table

PARTS = 12


def rows(families, directory, *flags) -> dict[str, table.Cells]:
    """Return the outcomes of families, by the command: it forks, and pytest may have threads."""
    argv = ["--only", ",".join(families), "--output", directory, *flags]
    done = run_module("tests.model_families", *argv, timeout=3000)
    assert done.returncode == 0, done.stderr[-4000:]
    return {family: table.cells(table.outcomes(directory, family)) for family in families}


@pytest.mark.parametrize(
    "families",
    [
        pytest.param(["emu3"], id="nested config"),
        pytest.param(["mamba2", "roformer"], id="infinity, frozen", marks=pytest.mark.soak),
    ],
)
def test_families_have_the_losses_of_plain_pytorch_and_are_exported(tmp_path, families):
    """A nested config; infinite values in a config, and a frozen parameter."""
    found = rows(families, tmp_path, "--phases", "check,zero3")
    assert {row["export"] for row in found.values()} == {"equal"}
    assert max(float(row["zero3"]) for row in found.values()) < table.TOLERANCE
    assert "mamba2" not in found or "carries state" in found["mamba2"]["mask"]


def test_the_document_has_the_recorded_exceptions():
    text, expected = table.documented()
    assert text == expected


@pytest.mark.soak
def test_a_family_that_crashes_leaves_the_others(tmp_path):
    found = rows(["no-family", "llama"], tmp_path)
    assert "KeyError" in found["no-family"]["zero2"]
    assert table.verdict(found["llama"]) == table.RIGHT


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", range(PARTS))
def test_families_have_the_documented_outcome(part, tmp_path):
    recorded = table.recorded()
    found = rows(sorted(recorded)[part::PARTS], tmp_path)
    wrong = {
        family: row
        for family, row in found.items()
        if table.verdict(row) != table.verdict(recorded[family])
    }
    assert not wrong
