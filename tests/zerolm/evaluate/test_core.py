"""CORE: prompts, choice of examples, and scores as nanochat's code defines them.

The accuracies of an export were compared with nanochat's own code by hand: docs/log.md.
"""

import json
import random

import pytest
import torch

from tests.core_bundle import TASKS, write_bundle
from tests.launching import LLAMA
from tests.texts import VOCABULARY, write_tokenizer
from zerolm.__main__ import main
from zerolm.common.errors import ConfigError
from zerolm.evaluate import core
from zerolm.evaluate.exported_model import evaluate_export
from zerolm.parts.settings import RunSettings

COUNT, POSITIONS = 40, 48


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM

    base = tmp_path_factory.mktemp("core")
    write_bundle(base / "bundle", COUNT)
    write_tokenizer(base / "model")
    config = {**LLAMA, "vocab_size": VOCABULARY, "initializer_range": 0.3}
    config |= {"max_position_embeddings": POSITIONS, "bos_token_id": None}
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base / "model")
    return base


def task(kind: str, num_fewshot: int, delimiter: str, items: list[dict]) -> core.Task:
    return core.Task("toy", kind, num_fewshot, delimiter, 0.25, items)


def test_prompts_have_the_examples_and_delimiters_of_the_definition() -> None:
    choices = [{"query": f"Q{n}", "choices": ["x", f"a{n}"], "gold": 1} for n in range(9)]
    one, two = random.Random(1234 + 4).sample([0, 1, 2, 3, 5, 6, 7, 8], 2)
    assert core.prompts(task("multiple_choice", 2, "\nA: ", choices), 4) == [
        f"Q{one}\nA: a{one}\n\nQ{two}\nA: a{two}\n\nQ4\nA: {last}" for last in ("x", "a4")
    ]
    schema = [{"context_options": [f"c{n}", "d"], "continuation": "e", "gold": 0} for n in range(3)]
    (other,) = random.Random(1234).sample([1, 2], 1)
    assert core.prompts(task("schema", 1, " ", schema), 0) == [
        f"c{other} e\n\nc0 e",
        f"c{other} e\n\nd e",
    ]
    words = [{"context": f" w{n} \n", "continuation": 7 + n} for n in range(2)]
    assert core.prompts(task("language_modeling", 1, ": ", words), 1) == [
        "w0: 7\n\nw1:",
        "w0: 7\n\nw1: 8",
    ]


def by_hand(base, task_number: int) -> list[bool]:
    """Answer each item of a task with one forward pass per prompt, from the files."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, kind, num_fewshot, file, delimiter, _ = TASKS[task_number]
    lines = (base / "bundle" / "eval_data" / file).read_text().splitlines()
    items = [json.loads(line) for line in lines]
    random.Random(1337).shuffle(items)
    model = AutoModelForCausalLM.from_pretrained(base / "model", dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(base / "model")

    def encode(text: str) -> list[int]:
        return [tokenizer.eos_token_id, *tokenizer.encode(text, add_special_tokens=False)]

    def score(ids: list[int], first: int) -> tuple[float, bool]:
        cut = max(0, len(ids) - POSITIONS)
        ids, first = ids[cut:], first - cut
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0]
        losses = torch.nn.functional.cross_entropy(
            logits[:-1], torch.tensor(ids[1:]), reduction="none"
        )
        likeliest = logits[first - 1 : -1].argmax(-1).tolist() == ids[first:]
        return losses[first - 1 :].mean().item(), likeliest

    found = []
    for number, item in enumerate(items):
        others = [each for each in range(len(items)) if each != number]
        chosen = random.Random(1234 + number).sample(others, num_fewshot)
        shots = [items[each] for each in chosen]
        if kind == "multiple_choice":
            start = "".join(
                f"{each['query']}{delimiter}{each['choices'][each['gold']]}\n\n" for each in shots
            )
            rows = [encode(f"{start}{item['query']}{delimiter}{c}") for c in item["choices"]]
            first = next(
                (at for at, ids in enumerate(zip(*rows, strict=False)) if len({*ids}) > 1),
                min(map(len, rows)),
            )
            losses = [score(ids, first)[0] if len(ids) > first else 1e9 for ids in rows]
            found.append(losses.index(min(losses)) == item["gold"])
        elif kind == "schema":
            start = "".join(
                f"{each['context_options'][each['gold']]}{delimiter}{each['continuation']}\n\n"
                for each in shots
            )
            ending = delimiter + item["continuation"]
            rows = [encode(f"{start}{option}{ending}") for option in item["context_options"]]
            same = next(n for n in range(1, 99) if len({ids[-n] for ids in rows}) > 1) - 1
            losses = [score(ids, len(ids) - same)[0] for ids in rows]
            found.append(losses.index(min(losses)) == item["gold"])
        else:
            start = "".join(
                f"{each['context'].strip()}{delimiter}{each['continuation']}\n\n" for each in shots
            )
            before = f"{start}{item['context'].strip()}{delimiter}"
            ids, first = encode(before + item["continuation"]), len(encode(before.strip()))
            assert ids[:first] == encode(before.strip()), "else nanochat's code stops here"
            found.append(score(ids, first)[1])
    return found


def test_answers_equal_those_of_single_forward_passes(base, tmp_path) -> None:
    output = tmp_path / "out.json"
    argv = ["evaluate", base / "model", "--core", base / "bundle", "--output", output]
    assert main([str(word) for word in argv]) == 0
    found = json.loads(output.read_text())
    centered = []
    for number, (label, *_, baseline) in enumerate(TASKS):
        expected = by_hand(base, number)
        assert found["core"][label]["correct"] == expected, label
        accuracy, chance = sum(expected) / COUNT, baseline / 100
        centered.append((accuracy - chance) / (1 - chance))
        assert found["figures"][f"core/{label}"] == pytest.approx(centered[-1])
    assert found["figures"]["core"] == pytest.approx(sum(centered) / len(TASKS))
    assert {len(each["correct"]) for each in found["core"].values()} == {COUNT}


def test_an_answer_longer_than_the_context_is_scored_as_far_as_it_fits(base, tmp_path) -> None:
    bundle = write_bundle(tmp_path / "bundle", 8)
    for file in (bundle / "eval_data").rglob("*.jsonl"):
        items = [json.loads(line) for line in file.read_text().splitlines()]
        for item in items:
            if "continuation" in item:
                item["continuation"] += " and so on" * 60
            else:
                item["choices"] = [choice + " and so on" * 60 for choice in item["choices"]]
        file.write_text("".join(json.dumps(item) + "\n" for item in items))
    results = evaluate_export(base / "model", RunSettings(core=str(bundle), core_items=5))
    assert all(len(each["correct"]) == 5 for each in results["core"].values())
    assert results["core"]["toy_words"]["accuracy"] == 0


def test_every_problem_of_a_bundle_is_reported_before_anything_runs(base, tmp_path) -> None:
    bundle = write_bundle(tmp_path / "bundle", 6)
    data = bundle / "eval_data"
    (data / "choices.jsonl").write_text('{"query": "x", "choices": ["a", "b"], "gold": 2}\n')
    (data / "more" / "choices.jsonl").unlink()
    (data / "schema.jsonl").write_text((data / "schema.jsonl").read_text()[:-9])
    (data / "words.jsonl").write_text('{"context": "x"}\n')
    lines = (data / "words_2.jsonl").read_text().splitlines()[:2]
    (data / "words_2.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError) as caught:
        evaluate_export(base / "model", RunSettings(core=str(bundle), core_items=0))
    for problem, (file, why) in zip(
        caught.value.problems,
        [
            ("choices.jsonl:1", "gold: 2 is not the number"),
            ("more/choices.jsonl", "cannot be read"),
            ("schema.jsonl:6", "not JSON"),
            ("words.jsonl:1", "continuation"),
            ("words_2.jsonl", "2 items are too few for 2 examples"),
        ],
        strict=True,
    ):
        assert file in problem and why in problem
    for file, content, why in (
        ("core.yaml", "icl_tasks: [}", "cannot be read"),
        ("core.yaml", "tasks: []", "icl_tasks is not a list"),
        ("core.yaml", "icl_tasks: [{label: x}]", "needs label"),
        ("eval_meta_data.csv", "Task,Baseline\nx,1\n", "needs the columns"),
        ("eval_meta_data.csv", "Eval Task,Random baseline\ntoy_words,0\n", "no random baseline"),
    ):
        damaged = write_bundle(tmp_path / "damaged", 6)
        (damaged / file).write_text(content)
        with pytest.raises(ConfigError, match=why):
            core.read_bundle(damaged)
    with pytest.raises(ConfigError, match="eval_bundle"):
        core.read_bundle(tmp_path / "none")
