"""A bundle of CORE in its published format, with tasks of all types, from the generated manual."""

import json
import random
from pathlib import Path
from typing import Any

import yaml

from tests.texts import paragraphs

# label, type, examples, file, delimiter, random baseline in percent
TASKS = (
    ("toy_choices", "multiple_choice", 0, "choices.jsonl", " ", 25),
    ("toy_choices_3", "multiple_choice", 3, "more/choices.jsonl", "\nAnswer: ", 25),
    ("toy_schema", "schema", 1, "schema.jsonl", " ", 50.0),
    ("toy_words", "language_modeling", 0, "words.jsonl", " ", 0),
    ("toy_words_2", "language_modeling", 2, "words_2.jsonl", "\n", 0),
)


def write_bundle(directory: Path, count: int, seed: int = 0) -> Path:
    """Write the bundle, each task with `count` items."""
    generator = random.Random(seed)
    texts = [words for words in map(str.split, paragraphs()) if len(words) > 14]
    entries, baselines = [], ["Eval Task,Task Category,Random baseline,Description"]
    for label, kind, num_fewshot, file, delimiter, baseline in TASKS:
        items = [_item(kind, generator, texts, number) for number in range(count)]
        path = directory / "eval_data" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(item) + "\n" for item in items))
        entry = {"label": label, "icl_task_type": kind, "dataset_uri": file}
        more = {} if delimiter == " " else {"continuation_delimiter": delimiter}
        entries.append({**entry, "num_fewshot": [num_fewshot], **more})
        baselines.append(f'{label},words,{baseline},"a, b"')
    (directory / "core.yaml").write_text(yaml.safe_dump({"icl_tasks": entries}))
    (directory / "eval_meta_data.csv").write_text("\n".join(baselines) + "\n")
    return directory


def _item(
    kind: str, generator: random.Random, texts: list[list[str]], number: int
) -> dict[str, Any]:
    words = [text[:8] for text in generator.sample(texts, 3)]
    gold = generator.randrange(2)
    start = " ".join(words[0][:4])
    if kind == "language_modeling":
        return {"context": start + " " * (number % 2), "continuation": words[0][4][:2]}
    if kind == "schema":
        options = [" ".join(words[each][:4]) for each in (0, 1)]
        ending = " ".join(words[gold][4:7])
        return {"context_options": options, "continuation": ending, "gold": gold}
    choices = [" ".join(words[each][4:6]) for each in (1, 2)]
    choices.insert(gold, " ".join(words[0][4:6]))
    if number % 5 == 0:  # the tokens of one choice begin another
        choices.append(choices[0] + " and")
    return {"query": start, "choices": choices, "gold": gold}
