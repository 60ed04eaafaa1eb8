"""lm-eval prints nothing into a run's log and hides no other output; tasks run with tiktoken."""

import json
import re
import sys
import threading

import tiktoken
import torch
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM

from data_prep.tokenizer.load import load_tokenizer
from tests import ROOT
from tests.launching import LLAMA
from tests.texts import write_items, write_task
from zerolm.__main__ import main
from zerolm.evaluate.lm_eval import quiet

EXAMPLE = (ROOT / "docs" / "evaluation.md").read_text().partition("A task of your own")[2]


def test_quiet_hides_progress_bars_only(capsys) -> None:
    with quiet():
        other = threading.Thread(target=lambda: print("rank 1 is lost", file=sys.stderr))
        other.start()
        other.join()
        list(tqdm(range(3), desc="hidden"))
    list(tqdm(range(3), desc="shown"))
    said = capsys.readouterr().err
    assert "rank 1 is lost" in said and "shown" in said and "hidden" not in said


def test_tasks_run_on_an_export_with_a_tokenizer_of_tiktoken(tmp_path, monkeypatch) -> None:
    encoding = tiktoken.Encoding(
        "tiny",
        pat_str=r"\w+|\W",
        mergeable_ranks={bytes([byte]): byte for byte in range(256)},
        special_tokens={"<|endoftext|>": 300},
    )
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: encoding)
    exported = tmp_path / "exported"
    load_tokenizer("tiktoken:tiny").write_copy(exported)
    torch.manual_seed(0)
    settings = LLAMA | {"max_position_embeddings": 512, "initializer_range": 0.2}
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**settings)).save_pretrained(exported)
    items = write_items(tmp_path / "items.jsonl", 12)
    monkeypatch.chdir(tmp_path)
    write_task(tmp_path / "tasks", items)
    for kind, ending in ("yaml", "yaml"), ("json", "jsonl"):  # the example in the documents
        text = re.search(rf"```{kind}\n(.*?)```", EXAMPLE, re.DOTALL)
        (tmp_path / "tasks" / f"capitals.{ending}").write_text(text[1])
    documents = [json.loads(line) for line in text[1].splitlines()]
    words = ["evaluate", exported, "--tasks", "local_hellaswag,capitals", "--hellaswag", items]
    words += ["--eval_task_path", tmp_path / "tasks"]
    assert main([str(word) for word in [*words, "--output", tmp_path / "found.json"]]) == 0
    figures = json.loads((tmp_path / "found.json").read_text())["figures"]
    assert figures["local_hellaswag/acc"] == figures["hellaswag/acc"]
    assert figures["local_hellaswag/acc_norm"] == figures["hellaswag/acc_norm"]
    model = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32)

    def log_likelihood(prompt: str, answer: str) -> float:
        ids = torch.tensor(encoding.encode(prompt + answer))
        with torch.no_grad():
            logits = model(ids[None]).logits[0].log_softmax(-1)
        places = range(len(encoding.encode(prompt)), len(ids))
        return sum(float(logits[place - 1, ids[place]]) for place in places)

    right = 0
    for document in documents:
        prompt = f"The capital of {document['country']} is"
        scores = [log_likelihood(prompt, f" {choice}") for choice in document["choices"]]
        right += scores.index(max(scores)) == document["answer"]
    assert figures["capitals/acc"] == right / len(documents)
