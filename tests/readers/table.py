"""Outcomes of the other programs for each family: their table, and its summary for the docs."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from tests import ROOT
from tests.model_families.table import recorded
from tests.readers import environment

PROGRAM = Path(__file__).with_name("read_models.py")
RESULTS = ROOT / "benchmarks" / "results" / "readers.json"
TABLE = ROOT / "benchmarks" / "results" / "readers.md"
PAGE, BEGIN, END = ROOT / "docs" / "readers.md", "<!-- Generated", "<!-- End of the generated part"
READERS = {
    "transformers": "transformers 4.57.6", "llama_cpp": "llama.cpp (llama-cpp-python 0.3.36)",
    "mlx": "mlx-lm 0.32.2 (mlx 0.32.4)", "ctranslate2": "ctranslate2 4.8.5",
}  # fmt: skip
ALLOWED = 1e-3  # of the largest logit; programs approximate GELU, and sum in another order
PATH = r"(?<!\S)/(?:[^\s/]+/)+"  # of a machine, before the name of a file
UNKNOWN = (  # what the programs say of families that they do not have
    "does not recognize", "Transformers does not", "Unrecognized configuration class",
    "No conversion is registered", "not supported",
)  # fmt: skip


def families() -> list[str]:
    """Return the families that can be trained."""
    return [name for name, row in recorded().items() if row["zero2"][:1].isdigit()]


def read(reader: str, directory: Path, names: tuple[str, ...] = ()) -> dict[str, Any]:
    """Compute the models of a directory with a reader; one that crashes is left out the next time.

    Returns:
        {family: what `read_models` writes}.
    """
    out, found = directory / f"{reader}.json", dict[str, Any]()
    wanted = list(names or [each.name for each in sorted((directory / "models").iterdir())])
    while wanted := [each for each in wanted if each not in found]:
        if not (directory / "models" / wanted[0]).is_dir():
            found[wanted[0]] = {}
            continue
        command = [environment.PYTHON, PROGRAM, reader, directory / "models", out]
        subprocess.run(
            [*map(str, command), *wanted], env=environment.variables(), cwd=ROOT, timeout=1800,
            capture_output=True,
        )  # fmt: skip
        done = json.loads(out.read_text()) if out.exists() else {}
        if not done.keys() - found.keys():
            break
        found |= done
    return {name: value for name, value in found.items() if value}


def outcome(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> str:
    """Return "equal", "differs: ...", "refused: ..." or "" for a family that a reader has not."""
    if "refused" in theirs:
        reason = theirs["refused"]
        if any(each in reason for each in UNKNOWN):
            return ""
        return f"refused: {re.sub(PATH, '', reason)[:120]}"
    logits = ours["logits"]
    found = torch.tensor(theirs["logits"])[:, : logits.shape[1]]
    difference = float((found - logits).abs().max() / logits.abs().max())
    same = float((found.argmax(-1) == logits.argmax(-1)).float().mean())
    if difference <= ALLOWED and theirs["greedy"] == ours["greedy"]:
        return f"equal: {difference:.0e}"
    return f"differs: {difference:.0e} of the largest logit, argmax equal at {same:.0%}"


def table_of(results: Mapping[str, Mapping[str, str]], limits: Mapping[str, str]) -> str:
    """Return the table, and the numbered notes of `limits` ({"reader family": reason})."""
    lines = [f"| family | {' | '.join(READERS.values())} |", "|---" * (len(READERS) + 1) + "|"]
    notes: list[str] = []
    for family in sorted({name for each in results.values() for name in each}):
        cells = []
        for reader in READERS:
            cell = results.get(reader, {}).get(family, "")
            kind, _, detail = cell.partition(": ")
            if kind in ("differs", "refused"):
                note = limits.get(f"{reader} {family}", detail.replace("|", "/"))
                if note not in notes:
                    notes.append(note)
                cell = f"{kind} [{notes.index(note) + 1}]"
            cells.append(cell.replace("equal: ", "") or "-")
        if any(cell != "-" for cell in cells):
            lines.append(f"| `{family}` | {' | '.join(cells)} |")
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    return "\n".join([*lines, "", *numbered])


def summary_of(results: Mapping[str, Mapping[str, str]]) -> str:
    """Return the families of each program by the kind of its outcome."""
    lines = ["| program | computes the same | differs | refused |", "|---|---|---|---|"]
    for reader, title in READERS.items():
        kinds: dict[str, list[str]] = {"equal": [], "differs": [], "refused": []}
        for family, cell in sorted(results.get(reader, {}).items()):
            if cell:
                kinds[cell.partition(": ")[0]].append(f"`{family}`")
        lines.append(f"| {title} | {' | '.join(map(', '.join, kinds.values()))} |")
    return "\n".join(lines)


def write_tables(results: Mapping[str, Mapping[str, str]], limits: Mapping[str, str]) -> None:
    for path, table in ((TABLE, table_of(results, limits)), (PAGE, summary_of(results))):
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        heading, _, after = rest.partition("\n")
        after = after[after.index(END) :]
        path.write_text(f"{before}{BEGIN}{heading}\n\n{table}\n\n{after}", encoding="utf-8")


def load() -> dict[str, Any]:
    return json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
