"""Compare each family's logits for rows together and alone, and between attention kernels.

    python -m tests.model_families.same_logits --state same_logits.jsonl --output same_logits.md

The answers are those of `--check`, see docs/models.md. What the state has is not compared again.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

from tests.launching import write_json
from tests.model_families.sweep import FAMILIES
from tests.model_families.table import REFUSED, exceptions_table
from tests.model_families.toy_configs import toy_config
from zerolm.attention import flash, stand_ins
from zerolm.common.errors import ConfigError, Findings
from zerolm.config.settings import VARLEN
from zerolm.model.architecture import causal_lm_class
from zerolm.model.document_mask import unsupported_reason
from zerolm.model.model import Model
from zerolm.parts.parse import parse_settings
from zerolm.preflight import same_logits

KERNELS = ("eager", stand_ins.FLEX, VARLEN, *flash.VERSIONS)
COMPARED = {"rows together and alone": "auto"} | {f"`{kernel}`": kernel for kernel in KERNELS}
MASKED = " with `--document_mask`"
EVERY, MODEL = "every kernel" + MASKED, "every run"
EQUAL, NOTICE = "equal", "said"

Answers = dict[str, str]  # {what was compared: answer}


def answers(family: str) -> Answers:
    """Return an answer for each of `COMPARED`, without and with the document mask."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = Model.load(str(write_json(Path(folder) / "m.json", toy_config(family))))
        except ConfigError:
            return {MODEL: REFUSED}
        found = {name: answer(model, kernel) for name, kernel in COMPARED.items()}
        if unsupported_reason(model.config, causal_lm_class(model.config), "sdpa"):
            return found | {EVERY: REFUSED}
        return found | {
            name + MASKED: answer(model, kernel, "--document_mask")
            for name, kernel in COMPARED.items()
        }


def answer(model: Model, kernel: str, *flags: str) -> str:
    settings, _ = parse_settings(["--seq_len", "32", "--attn_implementation", kernel, *flags])
    found = Findings([])
    same_logits.check(model, settings, found)
    return REFUSED if found.problems else NOTICE if found.notices else EQUAL


def page(rows: Mapping[str, Answers]) -> str:
    """Return the counts of answers, and the model types of each that is not `EQUAL`."""
    built = [found for found in rows.values() if MODEL not in found]
    counts = ""
    for name in COMPARED:
        plain = Counter(found[name] for found in built)
        masked = Counter(found.get(name + MASKED, REFUSED) for found in built)
        cells = [counter[kind] for counter in (plain, masked) for kind in (EQUAL, REFUSED, NOTICE)]
        counts += f"| {name} | {' | '.join(map(str, cells))} |\n"
    exceptions: dict[tuple[str, str], list[str]] = {}
    for family, found in sorted(rows.items()):
        for place, given in found.items():
            without = found.get(place.removesuffix(MASKED)) if place.endswith(MASKED) else EQUAL
            if given != (without or EQUAL):
                exceptions.setdefault((given, place), []).append(f"`{family}`")
    return f"""# Logits of the same rows in other micro-batches, and with other kernels

```bash
python -m tests.model_families.same_logits --state same_logits.jsonl --output same_logits.md
```

Toy configs of {len(rows)} model types, transformers {version("transformers")}, torch \
{version("torch").partition("+")[0]} on a CPU in float32, compared as \
[models.md](../../docs/models.md) says: rows \
in one micro-batch of four, and alone; kernels with `sdpa`, or `eager` where the family has none. \
Said: by a notice.

| compared | rows: equal | refused | said | with `--document_mask`: equal | refused | said |
|---|---|---|---|---|---|---|
{counts}
With `--document_mask`, only what differs from the answer without it.

{exceptions_table(exceptions)}""".replace("\\\n", "")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="JSON lines of the answers")
    parser.add_argument("--output", type=Path, required=True, help="Markdown page")
    parser.add_argument("--only", help="comma-separated model types (default: all)")
    arguments = parser.parse_args()
    rows: dict[str, Answers] = {}
    with arguments.state.open("a+", encoding="utf-8") as state:
        state.seek(0)
        for line in state:
            rows |= json.loads(line)
        for family in arguments.only.split(",") if arguments.only else FAMILIES:
            if family not in rows:
                rows[family] = answers(family)
                print(json.dumps({family: rows[family]}), file=state, flush=True)
    arguments.output.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
