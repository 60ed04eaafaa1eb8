"""Text for the tests of evaluations and samples, from the generated manual: nothing is downloaded.

From it the tests make a small tokenizer, token shards with that tokenizer, and items in the format
of HellaSwag.
"""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

from data_prep.tokenizer.bpe import BpeOptions, train_bpe
from data_prep.tokenizer.encoders import load_encoder
from data_prep.tokenizer.load import load_tokenizer
from tests.manual import topics
from zerolm.shards.writer import ShardWriter

VOCABULARY = 512
ARTIFACTS = (" [title]", " [header]", " [step]")  # as in the WikiHow part of the dataset
YAML = """\
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {path}
output_type: multiple_choice
validation_split: validation
process_docs: !function {module}.process_docs
doc_to_text: "{{{{query}}}}"
doc_to_target: "{{{{label}}}}"
doc_to_choice: "choices"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
  - metric: acc_norm
    aggregation: mean
    higher_is_better: true
"""


def paragraphs() -> list[str]:
    texts = []
    for topic in sorted(topics):
        for text in re.split(r"\n\s*\n", topics[topic]):
            words = text.split()
            if len(words) > 12:
                texts.append(" ".join(words))
    return texts


def write_tokenizer(directory: Path) -> Path:
    train_bpe(paragraphs(), BpeOptions(VOCABULARY), directory, progress=False)
    return directory


def write_text_shards(directory: Path, tokenizer_dir: Path, first: int = 0) -> Path:
    """Write a shard directory as `data_prep tokenize` does, its tokenizer beside it.

    Args:
        first: number of the first paragraph.
    """
    tokenizer = load_tokenizer(str(tokenizer_dir))
    entry = {"name": tokenizer.name, "fingerprint": tokenizer.fingerprint, "files": []}
    encoded = load_encoder(tokenizer_dir).encode(paragraphs()[first:1500])
    with ShardWriter(
        directory, vocab_size=tokenizer.vocab_size, eos_id=tokenizer.eos_id, tokenizer=entry
    ) as writer:
        for document in encoded.ids:
            writer.add([*document, tokenizer.eos_id])
    shutil.copytree(tokenizer_dir, directory / "tokenizer")
    return directory


def items(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Return items in HellaSwag's format: the true ending of a paragraph, and endings of others."""
    generator = random.Random(seed)
    texts = [[word for word in text.split() if len(word) < 20] for text in paragraphs()]
    texts = [words for words in texts if len(words) > 12]
    found = []
    for number in range(count):
        chosen = generator.sample(texts, 4)
        cuts = [generator.randint(6, len(words) - 3) for words in chosen]
        label = generator.randrange(4)
        words, cut = chosen[label], cuts[label]
        break_at = generator.randint(2, cut - 2)
        endings = [
            " ".join(w[c : c + generator.randint(3, 9)]) for w, c in zip(chosen, cuts, strict=True)
        ]
        ctx_a, ctx_b = " ".join(words[:break_at]), " ".join(words[break_at:cut])
        if number % 5 == 0:
            ctx_a += generator.choice(ARTIFACTS) + " Ärger – 雪"
            endings = [ending + generator.choice(ARTIFACTS) + " naïve" for ending in endings]
        if number % 7 == 0:
            ctx_b = ""
        found.append(
            {
                "ind": number,
                "activity_label": f"Topic {number % 11}",
                "ctx_a": ctx_a,
                "ctx_b": ctx_b,
                "ctx": f"{ctx_a} {ctx_b}",
                "endings": endings,
                "source_id": f"topics~{number}",
                "split": "val",
                "split_type": "indomain",
                "label": str(label),
            }
        )
    return found


def write_items(path: Path, count: int, seed: int = 0) -> Path:
    path.write_text("".join(json.dumps(item) + "\n" for item in items(count, seed)))
    return path


def write_task(directory: Path, data: Path, name: str = "local_hellaswag") -> Path:
    """Write a task for lm-eval that runs its HellaSwag code on a local file."""
    import lm_eval

    source = Path(lm_eval.__file__).parent / "tasks" / "hellaswag" / "utils.py"
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "hellaswag_utils.py").write_text(source.read_text())
    text = YAML.format(name=name, path=data, module="hellaswag_utils")
    (directory / f"{name}.yaml").write_text(text)
    return directory
