"""The OLMES suite: lm-eval gets the requests of the files, and the scores are theirs by hand."""

import gzip
import json
import math

import pytest
import torch

from tests.launching import LLAMA
from tests.texts import VOCABULARY, paragraphs, write_tokenizer
from zerolm.common.errors import ConfigError
from zerolm.evaluate import olmes
from zerolm.evaluate.exported_model import evaluate_export
from zerolm.parts.settings import RunSettings

COUNT = 3
DIRECTORIES = [name for suite in olmes.SUITES.values() for each in suite.values() for name in each]


def lines(directory: str, seed: int) -> list[dict]:
    """Return the requests of a task as OLMES writes them, and two that are to be ignored."""
    found = []
    texts = [text.split() for text in paragraphs()[seed : seed + COUNT]]
    for number, words in enumerate(texts):
        context, answer = " ".join(words[:6]), f" {words[6]} ü"
        if "bpb" in directory:
            found.append(request(number, 0, context, answer, [answer]))
        elif directory.startswith("winogrande"):  # the contexts differ, not the answer
            for index, name in enumerate(("Sarah", "Maria")):
                found.append(request(number, index, f"{context} {name}", answer, number % 2))
        else:
            for index in range(3):
                found.append(
                    request(number, index, context, f" {words[6 + index]}", (number + seed) % 3)
                )
    without = [request(olmes.UNCONDITIONAL + n, 0, "Answer:", " x", 0) for n in range(2)]
    return found + without


def request(number: int, index: int, context: str, continuation: str, label: object) -> dict:
    sent = {"context": context, "continuation": continuation}
    kind = {"request_type": "loglikelihood", "doc": {"id": str(number)}, "task_name": "x"}
    return {**kind, "doc_id": number, "idx": index, "label": label, "request": sent}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    from transformers import AutoConfig, AutoModelForCausalLM

    base = tmp_path_factory.mktemp("olmes")
    for seed, name in enumerate(DIRECTORIES):
        directory = base / "oe_eval_tasks" / name
        directory.mkdir(parents=True)
        metric = "acc_per_char" if seed % 2 else "acc_raw"
        config = {"task_name": name, "task_config": {"primary_metric": metric}}
        (directory / "config.json").write_text(json.dumps(config))
        with gzip.open(directory / "requests.jsonl.gz", "wt") as file:
            file.write("".join(json.dumps(line) + "\n" for line in lines(name, seed)))
    write_tokenizer(base / "model")
    config = {**LLAMA, "vocab_size": VOCABULARY, "initializer_range": 0.3}
    config["max_position_embeddings"] = 128
    config = AutoConfig.for_model(config.pop("model_type"), **config)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base / "model")
    return base


def test_lm_eval_gets_exactly_the_requests_of_the_files(base) -> None:
    tasks = olmes.load(str(base))["tasks"]
    assert [*tasks] == [olmes.task_name(name) for name in DIRECTORIES] and len(tasks) == 47
    for seed, (name, task) in enumerate(zip(DIRECTORIES, tasks.values(), strict=True)):
        task.build_all_requests(limit=None, rank=0, world_size=1)
        expected = [
            (line["request"]["context"], line["request"]["continuation"])
            for line in lines(name, seed)
            if line["doc_id"] < olmes.UNCONDITIONAL
        ]
        assert [instance.args[:2] for instance in task.instances] == expected


def test_scores_and_averages_are_those_by_hand(base) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    settings = RunSettings(eval_tasks=("olmes_easy",), eval_task_path=str(base))
    found = evaluate_export(base / "model", settings)["figures"]
    model = AutoModelForCausalLM.from_pretrained(base / "model").eval()
    tokenizer = AutoTokenizer.from_pretrained(base / "model")

    def score(context: str, continuation: str) -> tuple[float, bool]:
        first = len(tokenizer.encode(context))
        ids = tokenizer.encode(context + continuation)
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, first - 1 : -1].double()
        chosen = logits.log_softmax(-1)[range(len(ids) - first), ids[first:]]
        return float(chosen.sum()), logits.argmax(-1).tolist() == ids[first:]

    means: dict[str, list[float]] = {}
    for seed, name in enumerate(DIRECTORIES):
        sums = dict.fromkeys(("acc", "acc_norm", "bpb"), 0.0)
        given = [line for line in lines(name, seed) if line["doc_id"] < COUNT]
        for number in range(COUNT):
            answers = [line for line in given if line["doc_id"] == number]
            texts = [line["request"]["continuation"] for line in answers]
            scores = [score(**line["request"]) for line in answers]
            label = answers[0]["label"] if len(answers) > 1 else 0
            totals = [total for total, _ in scores]
            normed = [total / len(text) for total, text in zip(totals, texts, strict=True)]
            sums["acc"] += totals.index(max(totals)) == label if len(answers) > 1 else scores[0][1]
            sums["acc_norm"] += normed.index(max(normed)) == label
            sums["bpb"] -= totals[label] / math.log(2) / len(texts[label].encode())
        task, has_choices = olmes.task_name(name), "bpb" not in name
        means[f"{name}/bpb"] = [sums["bpb"] / COUNT]
        assert found[f"{task}/bpb"] == pytest.approx(sums["bpb"] / COUNT, rel=1e-4)
        if has_choices or name.startswith("lambada"):
            assert found[f"{task}/acc"] == pytest.approx(sums["acc"] / COUNT)
        if has_choices:
            assert found[f"{task}/acc_norm"] == pytest.approx(sums["acc_norm"] / COUNT)
        kind = "acc_norm" if seed % 2 and has_choices else "acc"
        means[f"{name}/acc"] = [sums[kind] / COUNT]
    for suite, metric in (("qa", "acc"), ("qa", "bpb"), ("math", "bpb"), ("code", "bpb")):
        entries = olmes.SUITES[suite].values()
        values = [
            sum(means[f"{name}/{metric}"][0] for name in names) / len(names) for names in entries
        ]
        expected = sum(values) / len(values)
        assert found[f"olmes_easy/{suite}_{metric}"] == pytest.approx(expected, rel=1e-4)
    assert not any("primary" in key for key in found)


def test_every_missing_or_damaged_file_is_named(base, tmp_path) -> None:
    import shutil

    with pytest.raises(ConfigError, match="needs the OLMES requests"):
        olmes.load(str(tmp_path))
    copied = shutil.copytree(base / "oe_eval_tasks", tmp_path / "oe_eval_tasks")
    (copied / "piqa/val_rc_5shot/requests.jsonl.gz").unlink()
    (copied / "sciq/rc_5shot/config.json").write_text("{}")
    torn = copied / "csqa/val_rc_5shot/requests.jsonl.gz"
    torn.write_bytes(torn.read_bytes()[:-20])
    with gzip.open(copied / "medqa_en/rc_5shot/requests.jsonl.gz", "wt") as file:
        file.write(json.dumps(request(0, 0, "x", " y", 5)) + "\n")
    with gzip.open(copied / "lambada/bpb_0shot/requests.jsonl.gz", "wt") as file:
        file.write("")
    with pytest.raises(ConfigError) as caught:
        olmes.load(str(copied))
    named = ("csqa", "piqa", "sciq", "lambada", "medqa_en")
    for problem, name in zip(caught.value.problems, named, strict=True):
        assert f"/{name}/" in problem
