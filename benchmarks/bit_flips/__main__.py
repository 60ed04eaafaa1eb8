"""Flip single bits while a tiny model trains: which matter, which are found, and what checks cost.

    python -m benchmarks.bit_flips [--flips 200] [--clean_steps 10000] [--output FILE]

One process, ZeRO-2 in bf16 with float32 masters. After a warm-up the state is copied, and each flip
starts from the copy: a random bit of a random element, at a random one of the next steps. Without
checks the run of `--steps` further steps shows what the flip does, compared with the run without
it; with checks, whether it is found, and whether the result is then that of the run without it.
Results of flips are kept in `--directory`, so that the same command continues where it was stopped.
Costs are CPU seconds.
"""

import argparse
import json
import platform
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from benchmarks.bit_flips.experiment import Experiment
from benchmarks.bit_flips.tiny_run import BATCH, SEQ_LEN, flags, start
from tests.launching import VOCABULARY

MATTERS = 1e-3  # change of a loss
PLACES = (
    "gradient", "activation", "gradient of an activation", "weights (bf16)", "master weights",
    "first moment", "second moment", "state, during the update", "batch in memory",
    "shard on disk",
)  # fmt: skip


def plans(count: int) -> list[dict]:
    generator = random.Random(0)
    return [
        {
            "place": PLACES[number % len(PLACES)],
            "step": generator.randrange(1, 20),
            **{name: generator.random() for name in ("element", "bit", "module")},
        }
        for number in range(count)
    ]


def measure_flips(directory: Path, count: int, steps: int, places: list[str]) -> list[dict]:
    path = directory / f"flips-{steps}.jsonl"
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    known = {row["number"] for row in done}
    todo = [
        (number, flip)
        for number, flip in enumerate(plans(count))
        if number not in known and flip["place"] in places
    ]
    if not todo:
        return done
    from zerolm.integrity import seal

    usual, seal.MAX_INTERVAL = seal.MAX_INTERVAL, 1  # as where a step takes 100 ms or more
    experiment = Experiment(directory, steps)
    clean = experiment.clean
    for number, flip in todo:
        plain, checked = experiment.play(flip, False), experiment.play(flip, True)
        pairs = list(zip(plain["losses"], clean["losses"], strict=False))
        moves = max((1e9 if a is None else abs(a - b) for a, b in pairs), default=0.0)
        moves = 1e9 if moves != moves or len(plain["losses"]) < steps else moves
        row = {
            "number": number,
            **flip,
            "moves": moves,
            "refused": plain["found"],
            "changes": plain["final"] != clean["final"],
            "found": checked["found"],
            "corrected": checked["final"] == clean["final"],
        }
        done.append(row)
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(number, row["place"], f"{moves:.1e}", row["found"], flush=True)
    seal.MAX_INTERVAL = usual  # the costs are measured next
    return done


HALF = BATCH // 2
CLEAN = {
    "dropout, bf16": (),
    "fp32": (),
    "batch ramp": ("--batch_ramp_start", HALF * SEQ_LEN, "--micro_batch_size", HALF,
                   "--batch_ramp_tokens", 250_000),
    "high learning rate, which spikes": ("--learning_rate", 3e-2, "--max_skips", 0,
                                         "--rollback_after", 0),
    "attention within documents": ("--document_mask",),
    "average and adaptive clipping": ("--ema_tokens", 100_000, "--adaptive_clip", 2.5),
}  # fmt: skip
LARGER = "a larger model"
LARGER_FLAGS = ("--seq_len", 4 * SEQ_LEN, "--batch_tokens", 4 * BATCH * SEQ_LEN)
LARGER_CONFIG = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4 * SEQ_LEN,
}


def measure_clean(directory: Path, total: int) -> list[dict]:
    """Train without flips; count alarms, replays, and CPU seconds with and without the checks."""
    path = directory / "clean.jsonl"
    done = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    steps = {**dict.fromkeys(CLEAN, -(-total // len(CLEAN))), LARGER: -(-total // 100)}
    for name, each in list(steps.items())[len(done) :]:
        more, config = (LARGER_FLAGS, LARGER_CONFIG) if name == LARGER else (CLEAN[name], {})
        run = start(flags(directory, f"clean-{name.replace(' ', '-')}", *more, **config))
        batches, count = run.batches(), Counter()
        spent = Counter()
        count_time(run, spent)
        began = time.process_time()
        for _ in range(each):
            run.step(batches)
            run.respond_to_anomaly()
            found = run.integrity.replayed
            if found is not None:
                alarm = found.wrong or (found.tolerance and "nondeterministic")
                count["alarms" if alarm else found.why] += 1
            count["refused"] += not run.last_step.applied
        row = {
            "name": name, "steps": each, "alarms": count["alarms"], "odd": count["odd"],
            "spot": count["spot"], "refused": count["refused"],
            "total": time.process_time() - began, **spent,
        }  # fmt: skip
        batches.close()
        run.engine.destroy()
        done.append(row)
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
        print(row, flush=True)
    return done


def count_time(run: Any, spent: Counter) -> None:
    """Add up the CPU seconds of the parts of the checks."""
    integrity = run.integrity

    def wrap(owner: Any, name: str, part: str) -> None:
        original = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            began = time.process_time()
            try:
                return original(*args, **kwargs)
            finally:
                spent[part] += time.process_time() - began

        setattr(owner, name, timed)

    wrap(integrity, "_watch", "bounds and digests before the update")
    wrap(integrity, "end_step", "digests after the update")
    wrap(integrity, "_replay", "replays")
    wrap(integrity._recorder, "_add", "digests of embedding gradients")


def table(flips: list[dict], clean: list[dict], steps: int) -> str:
    lines = [
        f"Command: `python -m benchmarks.bit_flips --flips {len(flips)}`, {platform.machine()}, "
        f"torch {torch.__version__}. ZeRO-2, bf16, one rank, {steps} steps after the warm-up; "
        "digests in every step, as where a step takes 70 ms or more.",
        "",
        f"`matter`: without checks, a loss changes by {MATTERS:g} or more within {steps} steps, or "
        "the run crashes. `change bits`: the final weights or states differ, but no loss by that "
        "much. `harmless`: nothing differs at the end.",
        "",
        "| place | flips | matter | of these found | change bits | of these found | harmless "
        "| of these found | missed that matter |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    sums: Counter = Counter()
    for place in (*PLACES, "**all**"):
        rows = [row for row in flips if place in (row["place"], "**all**")]
        groups: dict[str, list[dict]] = {"matter": [], "change": [], "harmless": []}
        for row in rows:
            matters = row["moves"] >= MATTERS
            groups["matter" if matters else "change" if row["changes"] else "harmless"].append(row)
        cells = [place, str(len(rows))]
        for group in groups.values():
            cells += [str(len(group)), str(sum(row["found"] is not None for row in group))]
        missed = sum(row["found"] is None for row in groups["matter"])
        lines.append("| " + " | ".join([*cells, str(missed)]) + " |")
    for row in flips:
        sums[row["found"] or "not found"] += 1
    again = [row for row in flips if row["found"] and "again" in row["found"]]
    lines += ["", "| found by | flips |", "|---|---|"]
    lines += [f"| {name} | {count} |" for name, count in sums.most_common()]
    lines += ["", f"{sum(row['corrected'] for row in again)} of {len(again)} flips in steps that "
              "were computed again left all weights and states as without the flip."]  # fmt: skip
    missed = sorted(
        (row for row in flips if row["found"] is None and row["moves"] >= MATTERS),
        key=lambda row: -row["moves"],
    )
    lines += ["", "Missed flips that matter:", ""] if missed else []
    lines += [f"- {row['place']}: a loss changes by {row['moves']:.2g}" for row in missed]
    parts = [key for key in clean[0] if "digests" in key or key == "replays"] if clean else []
    lines += ["", "| steps without flips | steps | false alarms | odd, computed again | spot "
              "| refused | CPU ms a step | "
              + " | ".join(f"{part}, share" for part in parts) + " | all |",
              "|---" * (8 + len(parts)) + "|"]  # fmt: skip
    for row in clean:
        shares = [row.get(part, 0.0) / row["total"] for part in parts]
        lines.append(
            f"| {row['name']} | {row['steps']:,} | {row['alarms']} | {row['odd']} | {row['spot']} "
            f"| {row['refused']} | {1000 * row['total'] / row['steps']:.0f} | "
            + " | ".join(f"{share:.2%}" for share in (*shares, sum(shares)))
            + " |"
        )
    lines += ["", "Shares are of CPU seconds."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.bit_flips", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--flips", type=int, default=200)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--steps", type=int, default=50, help="after the warm-up")
    parser.add_argument("--clean_steps", type=int, default=10_000)
    parser.add_argument("--directory", type=Path, default=Path("runs/bit_flips"))
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    assert VOCABULARY == 512
    torch.set_num_threads(1)
    options.directory.mkdir(parents=True, exist_ok=True)
    flips = measure_flips(options.directory, options.flips, options.steps, options.places)
    clean = measure_clean(options.directory, options.clean_steps) if options.clean_steps else []
    text = table(flips, clean, options.steps)
    print(text)
    if options.output:
        options.output.write_text(text)


if __name__ == "__main__":
    main()
