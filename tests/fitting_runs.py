"""The table "what fits where": a run for each size of hardware, as `zerolm plan` estimates it.

`python -m tests.test_tables` writes it into docs/planning.md, and a shorter one into README.md.
"""

import io
import json
from contextlib import redirect_stdout
from functools import cache
from typing import Any, NamedTuple

from launch import __main__
from zerolm.common.values import count

SELECTIVE = " --gradient_checkpointing selective"


class Run(NamedTuple):
    """A run and its devices; it trains on the default number of tokens, 20 per parameter."""

    where: str
    model: str
    profile: str
    more: str
    hardware: str
    devices: int

    @property
    def flags(self) -> str:
        """The flags that `zerolm train` takes too."""
        return (
            f"--model_config model_configs/{self.model}.json "
            f"--deepspeed_config ds_configs/{self.profile}.json{self.more}"
        )

    @property
    def place(self) -> str:
        return f"--hardware {self.hardware} --devices {self.devices}"


RUNS = (
    Run("a laptop with 8 cores", "tiny", "zero1", "", "laptop", 1),
    Run("one card of 24 GB", "llama-160m", "zero1", SELECTIVE, "A10G", 1),
    Run("one card of 80 GB", "llama-1.3b", "zero1", SELECTIVE, "H100", 1),
    Run("8 cards of 80 GB", "llama-7b", "zero2", SELECTIVE, "H100", 8),
    Run("4 nodes of 8 x 80 GB", "llama-13b", "zero2", SELECTIVE, "H100", 32),
)


@cache
def plan(words: str) -> dict[str, Any]:
    output = io.StringIO()
    with redirect_stdout(output):
        assert __main__.main(["plan", "--json", *words.split()]) == 0
    return json.loads(output.getvalue())


def _cells(run: Run) -> dict[str, str]:
    found = plan(f"{run.flags} {run.place}")
    memory = found["memory"]
    assert memory["fits"], run
    used, capacity = (memory[name] / 2**30 for name in ("used", "capacity"))
    return {
        "where": run.where + (f" ({run.hardware})" if run.hardware != "laptop" else ""),
        "model": f"`{run.model}.json`",
        "profile": f"`{run.profile}.json`",
        "recomputed": "all but matmuls and attention" if run.more else "nothing",
        "tokens": count(found["total_tokens"]),
        "memory of a device": f"{used:.0f} of {capacity:.0f} GiB",
        "tokens per second": f"{found['tokens_per_second']:,.0f}",
        "hours": f"{24 * found['calendar_days']:,.0f}",
        "price": f"${found['price']:,.0f}" if found["price"] else "none",
        "command": f"`zerolm plan {run.flags} {run.place}`",
    }


def _table(names: tuple[str, ...]) -> str:
    rows = [_cells(run) for run in RUNS]
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    lines += [f"| {' | '.join(row[name] for name in names)} |" for row in rows]
    return "\n" + "\n".join(lines) + "\n\n"


def complete_table() -> str:
    measures = ("memory of a device", "tokens per second", "hours", "price", "command")
    return _table(("where", "model", "profile", "recomputed", "tokens", *measures))


def short_table() -> str:
    return _table(("where", "model", "profile", "tokens", "hours", "price"))
