"""Validation documents that the manifests show in the training shards are refused."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest

from data_prep.__main__ import main
from tests.data_prep.encode.tokenized import documents_of
from tests.data_prep.finished_shards.conversions import convert
from tests.data_prep.finished_shards.corpus import texts, tokenize
from tests.data_prep.small_corpus import write_jsonl
from zerolm.config.settings import Settings
from zerolm.data.sources import open_sources, source_problems


@pytest.fixture(scope="module")
def made(tmp_path_factory, tokenizer_directory) -> Path:
    """Shards of two files, made in several ways."""
    base, tokenizer = tmp_path_factory.mktemp("overlap"), tokenizer_directory
    one, two = (write_jsonl(base / f"{name}.jsonl", texts(120, name)) for name in (1, 2))
    tokenize([one], tokenizer, base / "whole")
    tokenize([one, two], tokenizer, base / "both")
    for share in (0.1, 0.3):
        flags = ["--val_fraction", share, "--val_output", base / f"val{share}"]
        tokenize([one], tokenizer, base / f"train{share}", *flags)
    flags = ["--val_fraction", 0.3, "--val_output", base / "val_two"]
    tokenize([two], tokenizer, base / "train_two", *flags)
    for name, source, parts in (
        ("parts", "whole", "a=0.6,b=0.4"),
        ("others", "whole", "a=0.3,b=0.7"),
        ("again", "parts/a", "c=0.5,d=0.5"),
        ("of_val", "val0.3", "a=0.5,b=0.5"),
    ):
        words = ["split", base / source, "--output", base / name, "--parts", parts]
        assert main(list(map(str, words))) == 0
    documents = np.concatenate(documents_of(base / "whole")).astype("<u2")
    documents.tofile(base / "flat.bin")
    for name in ("converted", "converted2"):
        words = ["--from", "nanogpt", "--tokenizer", tokenizer, "--output", base / name]
        flags = ["--shard_tokens", 2000] if name == "converted" else []
        assert convert(base / "flat.bin", *words, *flags) == 0
    recipe = {"sources": {"s": {"input": [str(one)]}}, "tokenize": {"tokenizer": str(tokenizer)}}
    for name, share in (("out1", 0.1), ("out3", 0.3)):
        content = {**recipe, "output": str(base / name)}
        content["tokenize"] = {**recipe["tokenize"], "val_fraction": share}
        (base / f"{name}.json").write_text(json.dumps(content))
        assert main(["run", str(base / f"{name}.json"), "--workers", "1"]) == 0
    shutil.copytree(base / "both", base / "copy")
    return base


def shared_texts(training: Path, validation: Path) -> set[tuple[int, ...]]:
    return set(map(tuple, documents_of(training))) & set(map(tuple, documents_of(validation)))


def refused(base: Path, training: list[str], validation: list[str]) -> list[str]:
    data = tuple(str(base / name) for name in training)
    settings = Settings(data=data, val_data=tuple(str(base / name) for name in validation))
    problems: list[str] = []
    sources = open_sources(settings, problems)
    assert not problems
    return [line for line in source_problems(sources, settings, None, None) if "held out" in line]


OVERLAPPING = [
    ("whole", "val0.3"),
    ("both", "val_two"),  # a file among several
    ("copy", "val0.1"),
    ("train0.1", "val0.3"),
    ("whole", "parts/b"),  # of the shards themselves
    ("train0.3", "parts/b"),  # of the file, split by its ids
    ("parts/a", "others/b"),
    ("parts/a", "again/c"),
    ("val0.3", "of_val/a"),
    ("converted", "converted2"),
    ("out1/s/shards", "out3/s/shards-validation"),
    ("whole", "out1/s/shards-validation"),  # the stage before read the file
    ("out1/s/shards", "val0.3"),
]
SEPARATE = [
    ("train0.3", "val0.3"),
    ("train0.3", "val0.1"),  # a smaller share holds out fewer of the same documents
    ("train_two", "val0.3"),
    ("parts/a", "parts/b"),
    ("parts/b", "again/c"),
    ("again/d", "again/c"),
    ("train0.3", "of_val/b"),
    ("out3/s/shards", "out1/s/shards-validation"),
]


@pytest.mark.parametrize(("training", "validation"), [*OVERLAPPING, *SEPARATE])
def test_shards_that_share_documents_are_refused_and_others_are_not(
    made, training, validation
) -> None:
    is_shared = (training, validation) in OVERLAPPING
    found = refused(made, [training], [validation])
    assert bool(found) == is_shared
    if training != "train_two":  # its file has some of the same short texts
        assert bool(shared_texts(made / training, made / validation)) == is_shared
    if is_shared:
        assert str(made / validation) in found[0] and f"--data {made / training}" in found[0]


def test_every_pair_of_sources_is_compared(made) -> None:
    found = refused(made, ["train_two", "train0.1", "parts/a"], ["val0.1", "val0.3"])
    pairs = {re.search(r": (\S+) has .* --data (\S+) has", line).groups() for line in found}
    assert pairs == {
        (str(made / "val0.1"), str(made / "parts/a")),
        (str(made / "val0.3"), str(made / "parts/a")),
        (str(made / "val0.3"), str(made / "train0.1")),
    }


def test_relative_names_and_other_columns_are_told_apart(
    made, tmp_path, tokenizer_directory, monkeypatch
) -> None:
    lines = [{"text": text, "other": f"{text} too"} for text in texts(30)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.chdir(tmp_path)
    tokenize(["a.jsonl"], tokenizer_directory, tmp_path / "relative")
    tokenize([tmp_path / "a.jsonl"], tokenizer_directory, tmp_path / "x", "--val_fraction", 0.3,
             "--val_output", tmp_path / "absolute")  # fmt: skip
    tokenize(["a.jsonl"], tokenizer_directory, tmp_path / "other", "--text_field", "other")
    assert refused(tmp_path, ["relative"], ["absolute"])
    assert not refused(tmp_path, ["other"], ["absolute"])
