"""HellaSwag is requested and scored as in lm-eval, item by item."""

import json

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.launching import LLAMA
from tests.texts import items, write_items, write_task, write_tokenizer
from zerolm.__main__ import main
from zerolm.common.errors import ConfigError
from zerolm.evaluate import hellaswag
from zerolm.evaluate.exported_model import evaluate_export
from zerolm.evaluate.likelihood import Row, batches, log_likelihoods
from zerolm.evaluate.text_coder import TextCoder
from zerolm.parts.settings import RunSettings

ITEMS, POSITIONS = 200, 96  # some contexts are too long for the model, and are truncated


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A model directory with random weights that are far from uniform, and items to ask it."""
    base = tmp_path_factory.mktemp("hellaswag")
    settings = LLAMA | {"max_position_embeddings": POSITIONS, "initializer_range": 0.2}
    config = AutoConfig.for_model(**settings)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(base / "model")
    tokenizer = AutoTokenizer.from_pretrained(write_tokenizer(base / "tokenizer"))
    tokenizer.save_pretrained(base / "model")
    return base / "model", write_items(base / "items.jsonl", ITEMS)


@pytest.fixture(scope="module")
def ours(exported):
    settings = RunSettings(hellaswag=str(exported[1]), hellaswag_items=0)
    return evaluate_export(exported[0], settings, print_line=lambda *_: None)


def test_items_are_scored_as_lm_eval_scores_them(exported, ours, tmp_path) -> None:
    import lm_eval
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model, data = exported
    manager = TaskManager(
        include_path=str(write_task(tmp_path / "tasks", data)), include_defaults=False
    )
    tasks = manager.load(["local_hellaswag"])
    theirs = HFLM(pretrained=str(model), batch_size=7, device="cpu")
    found = lm_eval.evaluate(lm=theirs, task_dict=tasks, bootstrap_iters=0)
    samples = sorted(found["samples"]["local_hellaswag"], key=lambda sample: sample["doc_id"])
    assert len(samples) == len(ours["hellaswag"]) == ITEMS
    cut = 0
    coder = TextCoder(model)
    for sample, outcome, asked in zip(samples, ours["hellaswag"], items(ITEMS), strict=True):
        requests = hellaswag.item(asked).requests
        assert [tuple(arguments) for arguments in sample["arguments"]] == requests
        likelihoods = [likelihood for likelihood, _ in sample["filtered_resps"]]
        assert outcome["log_likelihoods"] == pytest.approx(likelihoods, abs=1e-4)
        assert sample["acc"] == (outcome["prediction"] == outcome["label"])
        assert sample["acc_norm"] == (outcome["prediction_norm"] == outcome["label"])
        cut += any(len(coder.row(*request).ids) > POSITIONS + 1 for request in requests)
    assert cut > 5, "some contexts are longer than the model takes"
    results, figures = found["results"]["local_hellaswag"], ours["figures"]
    assert figures["hellaswag/acc"] == pytest.approx(results["acc,none"])
    assert figures["hellaswag/acc_norm"] == pytest.approx(results["acc_norm,none"])
    assert figures["hellaswag/acc"] != figures["hellaswag/acc_norm"]


def test_batching_does_not_change_scores(exported, ours) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported[0]).eval()
    coder = TextCoder(exported[0])
    rows = coder.rows([hellaswag.item(each).requests for each in items(50)], POSITIONS)
    expected = [x for outcome in ours["hellaswag"][:50] for x in outcome["log_likelihoods"]]
    for batch_tokens in (1, 300, 10**6):
        sums, _ = log_likelihoods(
            model, rows, device="cpu", batch_tokens=batch_tokens, max_length=POSITIONS
        )
        assert sums.tolist() == pytest.approx(expected, abs=1e-4)
        numbers = sorted(number for batch in batches(rows, batch_tokens, 96) for number in batch)
        assert numbers == list(range(len(rows)))


def test_a_batch_does_not_exceed_its_token_limit() -> None:
    rows = [Row(list(range(length)), 1) for length in range(2, 200, 3)]
    for batch in batches(rows, 512, 200):
        columns = -(-(max(len(rows[number].ids) for number in batch) - 1) // 8) * 8
        assert len(batch) == 1 or len(batch) * columns <= 512


def test_no_row_is_padded_beyond_the_learned_positions() -> None:
    sizes = {"n_positions": 100, "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 128}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **sizes)).eval()
    rows = [Row([number % 128 for number in range(length)], 5) for length in (101, 99, 300)]
    sums, _ = log_likelihoods(model, rows, device="cpu", batch_tokens=1000, max_length=100)
    for row, found in zip(rows, sums.tolist(), strict=True):
        ids = torch.tensor([row.ids[-101:]])
        with torch.no_grad():
            chances = model(input_ids=ids[:, :-1]).logits.log_softmax(-1)[0, -5:]
        assert found == pytest.approx(float(chances.gather(1, ids[0, -5:, None]).sum()), abs=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"label": "4"}, "label: '4' is not the number of an ending"),
        ({"label": ""}, "label: ''"),
        ({"endings": "none"}, "endings a list"),
        ({"ctx_b": None}, "must be strings"),
        ({"ctx_a": ...}, "has no ctx_a"),
    ],
)
def test_an_invalid_line_is_refused_with_its_number(tmp_path, change, message) -> None:
    documents = items(3)
    documents[2] |= change
    documents[2] = {key: value for key, value in documents[2].items() if value is not ...}
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(document) + "\n" for document in documents))
    assert len(hellaswag.read_items(str(path), 2)) == 2
    with pytest.raises(ConfigError, match=f"items.jsonl:3: .*{message}"):
        hellaswag.read_items(str(path))


def test_a_missing_or_broken_file_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        hellaswag.read_items(str(tmp_path / "none.jsonl"))
    (tmp_path / "half.jsonl").write_text('{"ctx_a"\n')
    with pytest.raises(ConfigError, match=r"half.jsonl:1: not JSON"):
        hellaswag.read_items(str(tmp_path / "half.jsonl"))


def test_the_command_runs_hellaswag_and_tasks_on_a_model_directory(
    exported, ours, tmp_path, capsys
) -> None:
    model, data = exported
    tasks = write_task(tmp_path / "tasks", data)
    words = ["evaluate", model, "--hellaswag", data, "--tasks", "local_hellaswag"]
    words += ["--eval_task_path", tasks, "--output", tmp_path / "results.json"]
    assert main([str(word) for word in words]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    figures = found["figures"]
    assert figures == ours["figures"] | {
        "local_hellaswag/acc": pytest.approx(figures["hellaswag/acc"]),
        "local_hellaswag/acc_norm": pytest.approx(figures["hellaswag/acc_norm"]),
    }
    assert f"hellaswag/acc={figures['hellaswag/acc']:.6g}\n" in capsys.readouterr().out
    assert [each["label"] for each in found["hellaswag"]] == [int(i["label"]) for i in items(ITEMS)]
    assert main(["evaluate", str(tmp_path), "--hellaswag", str(data)]) == 2
    assert main(["evaluate", str(model)]) == 2
