"""Tests how `--check` answers senseless values in model configs: 0, -1, huge values and fractions.

    python -m benchmarks.perturbed_configs --log perturbed.jsonl              # resumes
    python -m benchmarks.perturbed_configs --log perturbed.jsonl --only model_configs/gpt2.json

Each numeric key of the shipped configs and of toy configs for 40 families is set to these values,
one at a time, and passed to `--check`. Independently, transformers alone builds a small model from
each accepted config. The model is right if no logit changes with a later token, and some change
with the previous token; if it learns a text in which each token follows from the previous one, at
least a third as well as with the original config; and if no additional parameters lack a gradient.
An answer is silent if the model is not right, but no problem or notice reports it. The process that
runs the trials has limits on time and memory.
"""

import argparse
import copy
import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.launching import write_json
from tests.model_families.toy_configs import SIZES, toy_config
from tests.zerolm.preflight.preflight_inputs import command, shards
from zerolm.common import machine
from zerolm.common.errors import ConfigError
from zerolm.preflight import check, remedies

ROOT = Path(__file__).parent.parent
RESULT = ROOT / "benchmarks" / "results" / "perturbed_configs.md"
FAMILIES = (
    *("llama", "mistral", "mixtral", "gpt2", "gpt_neox", "gptj", "gpt_neo", "opt", "bloom"),
    *("falcon", "mpt", "phi", "phi3", "phimoe", "gemma", "gemma2", "gemma3_text", "qwen2"),
    *("qwen2_moe", "qwen3", "qwen3_moe", "qwen3_next", "olmo2", "olmoe", "deepseek_v2"),
    *("deepseek_v3", "glm4_moe", "gpt_oss", "granite", "granitemoe", "cohere2", "starcoder2"),
    *("stablelm", "smollm3", "llama4_text", "mamba", "mamba2", "rwkv", "bert", "jamba"),
)
HUGE = {int: 10**9, float: 1e30}
FRACTION = 0.5
SECONDS, BYTES = 240, 6 << 30  # of a trial
TOKENS, ROWS, STEPS = 16, 8, 16
OUTCOMES = ("refused", "right", "named", "too large", "silent", "unanswered")
VALUES = ("0", "-1", "huge", "fraction")
Key = tuple[str, ...]


def configs() -> dict[str, dict[str, Any]]:
    """Return {name: config.json} for the shipped configs and the families."""
    shipped = sorted((ROOT / "model_configs").glob("*.json"))
    found = {f"model_configs/{path.name}": json.loads(path.read_text()) for path in shipped}
    families = {}
    for family in FAMILIES:
        config = toy_config(family)
        if "is_decoder" in config:
            config["is_decoder"] = True
        families[family] = config
    return found | families


def trials(every: dict[str, dict[str, Any]]) -> list[tuple[str, Key, str]]:
    """Return each trial's name, key and kind of value, shuffled so that a prefix is a sample."""
    found = [(name, key, kind) for name in every for key in keys(every[name]) for kind in VALUES]
    random.Random(0).shuffle(found)
    return found


def keys(values: dict[str, Any], prefix: Key = ()) -> Iterator[Key]:
    for key, value in values.items():
        if isinstance(value, dict) and key not in ("id2label", "label2id"):
            yield from keys(value, (*prefix, key))
        elif type(value) in HUGE:
            yield (*prefix, key)


def perturbed(config: dict[str, Any], key: Key, kind: str) -> dict[str, Any]:
    config = copy.deepcopy(config)
    part = config
    for name in key[:-1]:
        part = part[name]
    value = part[key[-1]]
    number = {"0": 0, "-1": -1, "huge": HUGE[type(value)], "fraction": value * FRACTION or FRACTION}
    part[key[-1]] = type(value)(number[kind]) if kind != "fraction" else number[kind]
    if kind == "fraction" and type(value) is int:
        part[key[-1]] = value + FRACTION
    return config


# -------------------------------------------------------------------------------------------------
# The answer of `--check`, and the independent judgement


def answer(config: dict[str, Any], inputs: Path) -> tuple[list[str], list[str]]:
    """Return the problems and notices of `--check`."""
    write_json(inputs / "model.json", config)
    flags = "--model_config model.json --data data --deepspeed_config ds.json --seq_len 24"
    flags += " --batch_tokens 480 --total_tokens 48000"
    try:
        return [], list(check.check(command(inputs, " " + flags), {}).notices)
    except ConfigError as error:
        return error.problems, []


def small_model(config: dict[str, Any], kept: Key | None) -> Any:
    """Build a model with transformers alone; sizes are reduced, except for the perturbed key."""
    values = {key: value for key, value in config.items() if key != "architectures"}
    is_toy = config.get("hidden_size", config.get("n_embd", 0)) <= 64
    for key, size in SIZES.items():
        value = values.get(key)
        if type(value) is int and value > size and not is_toy and (not kept or kept[0] != key):
            values[key] = size
    for width, heads in (("hidden_size", "num_attention_heads"), ("n_embd", "n_head")):
        if not is_toy and {width, heads} <= values.keys() and not {width, heads} & set(kept or ()):
            values[width] = 16 * values[heads]
    groups = "num_key_value_heads"  # two, except with an odd number of heads
    if not is_toy and groups not in (kept or ()) and values.get("num_attention_heads", 0) % 2:
        values[groups] = 1
    values = json.loads(json.dumps(values), object_hook=_infinity)
    made = CONFIG_MAPPING[values.pop("model_type")](**values)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(made, dtype=torch.float32, trust_remote_code=False)
    for module in model.modules():  # transformers zeroes the padding token's row
        if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                row, std = module.weight[module.padding_idx], float(module.weight.std())
                row.add_(
                    torch.randn(row.shape, generator=torch.Generator().manual_seed(0)), alpha=std
                )
    return model.train()


def _infinity(part: dict[str, Any]) -> Any:
    return float(part["__float__"]) if "__float__" in part else part


def judge(config: dict[str, Any], kept: Key | None) -> dict[str, Any]:
    """Test by brute force if the model is causal, how well it learns, and what lacks gradients."""
    model = small_model(config, kept)
    size = model.config.get_text_config().vocab_size
    names = [name for name, each in model.named_parameters() if each.requires_grad]
    initial = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for each in model.parameters():
            if each.ndim > 1:
                each.normal_(0, max(1, each.shape[-1]) ** -0.5)
    ids = torch.randint(8 % size, size, (TOKENS, TOKENS))
    diagonal = torch.arange(TOKENS)
    other = ids.clone()
    other[diagonal, diagonal] = (other[diagonal, diagonal] + 5) % size
    with torch.no_grad():
        torch.manual_seed(1)
        before = model(input_ids=ids, use_cache=False).logits
        torch.manual_seed(1)
        after = model(input_ids=other, use_cache=False).logits
    moved = (after - before).abs().amax(-1) / before.std()
    past = moved.tril(-1).max()  # row i has a changed token i: columns before i are its past
    following = moved.diagonal(1).max()
    model.load_state_dict(initial)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    alive: set[str] = set()
    losses = []
    follows = torch.randperm(size, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(0)
    for _ in range(STEPS):
        rows = torch.randint(0, min(size, 24), (ROWS, 1), generator=generator)
        for _ in range(TOKENS):
            rows = torch.cat([rows, follows[rows[:, -1:]] % min(size, 24)], 1)
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        alive |= {
            name
            for name, each in model.named_parameters()
            if each.grad is not None and float(each.grad.norm() * each.detach().norm()) > 1e-12
        }
        optimizer.step()
        losses.append(float(loss))
    return {
        "causal": bool(past < 1e-4 and following > 1e-4),
        "learned": losses[0] - losses[-1],
        "loss": losses[0],
        "dead": sorted(set(names) - alive),
    }


def is_right(found: dict[str, Any], original: dict[str, Any]) -> bool:
    more_dead = len(found["dead"]) > len(original["dead"])
    learns = found["learned"] >= original["learned"] / 3  # false for NaN
    return bool(found["causal"] and learns and not more_dead)


# -------------------------------------------------------------------------------------------------
# Trials


def work(trials: Connection, inputs: Path) -> None:
    """Run the trials in turn; for each return the answer of `--check`, then the judgement."""
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    while True:
        config, key = trials.recv()
        start = time.process_time()
        problems, notices = answer(config, inputs)
        found: dict[str, Any] = {"problems": problems, "notices": notices}
        found["seconds"] = round(time.process_time() - start, 2)
        trials.send(found)
        try:
            judged = {} if problems else judge(config, key)
        except Exception as error:
            judged = {"error": f"{type(error).__name__}: {str(error)[:200]}"}
        trials.send(judged)


class Worker:
    """A process that is replaced when it exits or takes too long."""

    def __init__(self, inputs: Path):
        self.inputs = inputs
        self.start()

    def start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.trials, theirs = context.Pipe()
        self.process = context.Process(target=work, args=(theirs, self.inputs), daemon=True)
        self.process.start()
        theirs.close()

    def run(self, config: dict[str, Any], key: Key | None) -> dict[str, Any]:
        found: dict[str, Any] = {"problems": [], "notices": [], "died": "no answer"}
        end = time.monotonic() + SECONDS
        try:
            self.trials.send((config, key))
            for received in ("answer", "judged"):
                if not self.trials.poll(max(0, end - time.monotonic())):
                    raise EOFError
                if received == "answer":
                    found = self.trials.recv()
                else:
                    found["judged"] = self.trials.recv()
        except (EOFError, OSError):
            self.process.kill()
            self.process.join()
            self.start()
        return found


def outcome(found: dict[str, Any], original: dict[str, Any], key: Key) -> str:
    """Return one of `OUTCOMES`."""
    if "died" in found:
        return "unanswered"
    if found["problems"]:
        return "refused"
    judged = found.get("judged", {"error": "died"})
    if "error" not in judged and is_right(judged, original["judged"]):
        return "right"
    if "allocate memory" in judged.get("error", ""):
        return "too large"
    named = (key[-1], "gradient", "not proven")
    new = set(found["notices"]) - set(original["notices"])
    return "named" if any(word in line for line in new for word in named) else "silent"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--log", type=Path, required=True, help="results so far, one per line")
    parser.add_argument("--only", help="a comma-separated list of configs")
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after these")
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    remedies.SECONDS = 0.0  # skip the search for valid values
    machine.free_bytes = lambda run_dir: 1 << 60  # enough disk space for any model
    every = configs()
    rows = [json.loads(line) for line in arguments.log.open()] if arguments.log.is_file() else []
    known = {(row["config"], tuple(row["key"]), row["kind"]) for row in rows}
    originals = {row["config"]: row for row in rows if not row["key"]}
    only = arguments.only.split(",") if arguments.only else list(every)
    end = time.monotonic() + arguments.minutes * 60
    with tempfile.TemporaryDirectory() as directory, arguments.log.open("a") as log:
        inputs = Path(directory)
        shards(inputs / "data", vocab_size=8, tokens=20_000)
        write_json(inputs / "ds.json", {"zero_optimization": {"stage": 2}})
        worker = Worker(inputs)
        for name, key, kind in trials(every):
            if time.monotonic() > end:
                break
            if name not in only or (name, key, kind) in known:
                continue
            if name not in originals:
                row = {"config": name, "key": [], "kind": "", **worker.run(every[name], None)}
                originals[name] = row
                print(json.dumps(row), file=log, flush=True)
            config = perturbed(every[name], key, kind)
            found = worker.run(config, key)
            row = {"config": name, "key": key, "kind": kind, **found}
            row["outcome"] = outcome(found, originals[name], key)
            print(json.dumps(row), file=log, flush=True)
    rows = [json.loads(line) for line in arguments.log.open()]
    text = table([row for row in rows if row["key"]], len(trials(every)))
    print(text)
    if arguments.write:
        RESULT.write_text(text)


def table(rows: list[dict[str, Any]], total: int) -> str:
    """Return the counts by config and by value, and each trial without an answer."""
    lines = [
        "# Perturbed model configs",
        "",
        "`python -m benchmarks.perturbed_configs --log FILE --write`: each numeric key of the",
        "shipped configs and of 40 toy configs of families, with 0, -1, a huge value (10^9, 1e30",
        "for a fraction) and half of itself (a count: a half more). `--help` says how a model is",
        f"judged right. {len(rows):,} of {total:,} trials were run; the same command resumes.",
        "",
        "| configs | value | trials | " + " | ".join(OUTCOMES) + " |",
        "|---|---|---|" + "---|" * len(OUTCOMES),
    ]
    for group in ("shipped", "families"):
        chosen = [row for row in rows if ("/" in row["config"]) == (group == "shipped")]
        for kind in (*VALUES, "all"):
            counts = Counter(r["outcome"] for r in chosen if kind in (r["kind"], "all"))
            cells = [f"{counts[name]:,}" for name in OUTCOMES]
            lines.append(f"| {group} | {kind} | {counts.total():,} | " + " | ".join(cells) + " |")
    lines += ["", "By key, over all configs:", "", "| key | " + " | ".join(VALUES) + " |"]
    lines.append("|---|" + "---|" * len(VALUES))
    for key in sorted({".".join(row["key"]) for row in rows}):
        cells = []
        for kind in VALUES:
            of = [r for r in rows if ".".join(r["key"]) == key and r["kind"] == kind]
            counts = Counter(row["outcome"] for row in of)
            cells.append(", ".join(f"{count} {name}" for name, count in counts.most_common()))
        lines.append(f"| `{key}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
