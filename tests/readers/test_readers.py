"""Exports are read alike by transformers 4, llama.cpp, mlx-lm and ctranslate2."""

import json
import random
import re
import subprocess

import pytest

from data_prep.tokenizer.bpe import BpeOptions, train_bpe
from data_prep.tokenizer.encoders import load_encoder
from tests import ROOT
from tests.end_to_end import runs_in_one_process
from tests.end_to_end.recipe import STEPS, profile, recipe
from tests.launching import write_json
from tests.model_families.toy_configs import toy_config
from tests.readers import environment, models, table
from tests.readers.limits import LIMITS
from zerolm.__main__ import main

FAMILIES = [
    "llama", "deepseek_v3", "gemma3_text", "gpt2", "mixtral", "qwen2", "qwen3_moe", "falcon",
]  # fmt: skip
TOKENIZE = """
import json, sys
from llama_cpp import Llama
model = Llama(sys.argv[1], vocab_only=True, verbose=False)
texts = json.load(sys.stdin)
print(json.dumps([model.tokenize(text.encode(), add_bos=True, special=False) for text in texts]))
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    directory = tmp_path_factory.mktemp("readers")
    return directory, models.write_models(FAMILIES, directory)


def require(llama: bool) -> None:
    try:
        (environment.install_llama if llama else environment.install)()
    except environment.Unavailable as error:
        pytest.skip(f"the other programs cannot be installed: {error}")


def test_every_recorded_difference_has_a_reason_and_no_path():
    for reader, outcomes in table.load().items():
        for family, text in outcomes.items():
            assert not re.search(table.PATH, text)
            if text.startswith(("differs", "refused")):
                assert f"{reader} {family}" in LIMITS
    refused = {"refused": "FileNotFoundError: File not found: /a/models/gemma2/tokenizer.model"}
    expected = "refused: FileNotFoundError: File not found: tokenizer.model"
    assert table.outcome(refused, {}) == expected


@pytest.mark.soak
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("reader", table.READERS)
def test_a_program_reads_exports_as_recorded(reader, written):
    """The outcomes are those of benchmarks/results/readers.json."""
    require(llama=reader == "llama_cpp")
    directory, ours = written
    recorded = table.load()[reader]
    found = table.read(reader, directory, tuple(FAMILIES))
    outcomes = {name: table.outcome(value, ours[name]) for name, value in found.items()}
    changed = {
        name: outcomes.get(name)
        for name in set(FAMILIES) & recorded.keys()
        if outcomes.get(name, "").partition(":")[0] != recorded[name].partition(":")[0]
    }
    assert not changed


DIVIDED = {  # {family: keys that differ from its toy config}
    "deepseek_v3": {"first_k_dense_replace": 1},
    "mixtral": {},
    "qwen3_moe": {"head_dim": 16, "norm_topk_prob": True},  # llama.cpp assumes the second
}


@pytest.fixture(scope="module")
def of_divided_runs(tmp_path_factory):
    """Export what two ranks, each with half of the experts, have trained."""
    base = tmp_path_factory.mktemp("divided")
    (base / "models").mkdir()
    (base / "text.jsonl").write_text(
        "\n".join(json.dumps({"text": text}) for text in models.texts())
    )
    words = BpeOptions(models.VOCABULARY, split="llama3")
    train_bpe(models.texts(), words, base / "tokenizer", progress=False)
    data = ["data", "tokenize", "--input", base / "text.jsonl", "--tokenizer", base / "tokenizer"]
    assert main([*map(str, [*data, "--output", base / "shards"])]) == 0
    jobs = []
    for family, keys in DIVIDED.items():
        config = write_json(base / f"{family}.json", models.finite(toy_config(family)) | keys)
        json_file = profile(base / "zero1.json", 1, bf16=False)
        flags = recipe(config, base / "shards", base / family, json_file, STEPS, 2)
        jobs.append({"flags": [*flags, "--expert_parallel", 2, "--wandb", "off"]})
    runs_in_one_process.launch(jobs, base, 2)
    ids = [random.Random(1).randrange(models.VOCABULARY) for _ in range(models.NUM_IDS)]
    (base / "models" / "ids.json").write_text(json.dumps(ids))
    for family in DIVIDED:
        out = base / "models" / family
        assert main(["export", str(base / family), str(out), "--precision", "fp32"]) == 0
    return base, {name: models.compute(base / "models" / name, ids) for name in DIVIDED}


@pytest.mark.soak
@pytest.mark.timeout(4000)
@pytest.mark.parametrize("reader", ["transformers", "llama_cpp"])
def test_a_program_reads_exports_of_runs_with_divided_experts(reader, of_divided_runs):
    require(llama=reader == "llama_cpp")
    directory, ours = of_divided_runs
    found = table.read(reader, directory, tuple(DIVIDED))
    outcomes = {name: table.outcome(value, ours[name]) for name, value in found.items()}
    print(outcomes)
    assert {name: each.partition(":")[0] for name, each in outcomes.items()} == dict.fromkeys(
        DIVIDED, "equal"
    )


@pytest.mark.soak
@pytest.mark.timeout(4000)
@pytest.mark.parametrize(
    ("options", "name", "different"),
    [({"split": "gpt2"}, "gpt-2", 0), ({"split": "llama3"}, "llama-bpe", 0),
     ({"split": "llama3", "digits": "1"}, "qwen2", 0), ({"split": "o200k"}, "gpt-4o", 60)],
)  # fmt: skip
def test_llama_cpp_encodes_texts_to_the_same_ids(options, name, different, written, tmp_path):
    require(llama=True)
    directory, _ = written
    model = tmp_path / "model"
    subprocess.run(["cp", "-r", directory / "models" / "llama", model], check=True, timeout=60)
    size = models.VOCABULARY
    train_bpe(models.texts(), BpeOptions(size, **options), model, progress=False)
    variables = environment.variables()
    command = [*json.loads(variables["READERS_CONVERT"]), model, name, "--vocab-only"]
    command += ["--outfile", tmp_path / "vocabulary.gguf"]
    done = subprocess.run(
        [*map(str, command)], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    texts = models.texts(500)[400:]  # not those of the training
    done = subprocess.run(
        [str(environment.PYTHON), "-c", TOKENIZE, str(tmp_path / "vocabulary.gguf")],
        input=json.dumps(texts), env=variables, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    ours = [ids.tolist() for ids in load_encoder(model).encode(texts).ids]
    unequal = [
        each for each in zip(json.loads(done.stdout), ours, strict=True) if each[0] != each[1]
    ]
    assert len(unequal) <= different, unequal[0]
