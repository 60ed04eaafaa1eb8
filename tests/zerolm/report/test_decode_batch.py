"""`python -m zerolm decode-batch`, against slices of the shards and transformers' own tokenizer."""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer

from tests.launching import run_here, run_module, write_json
from tests.manifests import WRITTEN
from zerolm.__main__ import main
from zerolm.checkpoint.manifest import FORMAT, VERSION, Progress, manifest_digest
from zerolm.data.order import Order
from zerolm.shards.reader import open_source

SEQ_LEN, SEED, BATCH = 16, 3, 4
TEXTS = [f"Text number {n}: {'word ' * (n % 40)}and {n * n} – é." for n in range(200)]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory) -> Path:
    """A run directory as it is after a rollback that left sequences [20, 32) out."""
    base = tmp_path_factory.mktemp("batches")
    sources = []
    for name, texts in (("a", TEXTS[:120]), ("b", TEXTS[120:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (base / f"{name}.jsonl").write_text(lines)
    made = run_module("data_prep", "train-tokenizer", "--input", base / "*.jsonl",
                "--vocab_size", 400, "--output", base / "tokenizer")  # fmt: skip
    assert made.returncode == 0, made.stderr
    for name in ("a", "b"):
        made = run_module("data_prep", "tokenize", "--input", base / f"{name}.jsonl", "--tokenizer",
                    base / "tokenizer", "--output", base / name, "--shard_tokens", 500)  # fmt: skip
        assert made.returncode == 0, made.stderr
        sources.append(open_source(base / name))
    run_dir = base / "run"
    run_dir.mkdir()
    prints = "\n".join(source.fingerprint for source in sources)
    settings = {"data": [f"{base / 'a'}=0.5", f"{base / 'b'}=0.5"], "seq_len": SEQ_LEN,
                "seed": SEED, "batch_tokens": BATCH * SEQ_LEN,
                "total_tokens": 10 * BATCH * SEQ_LEN}  # fmt: skip
    record = {
        "settings": settings,
        "data_fingerprint": hashlib.sha256(prints.encode()).hexdigest(),
        "skipped_windows": [[20, 32]],
    }
    write_json(run_dir / "run.json", record)
    entry = {
        "number": 1, "to_step": 4, "from_step": 8, "checkpoint": "step-00000004", "spikes": 1,
        "first_anomaly": 6, "skipped_window": [20, 32], "skipped_windows": [[20, 32]],
        "skipped_steps": 0, "reason": "loss",
    }  # fmt: skip
    write_json(run_dir / "rollbacks.json", {"rollbacks": [entry]})
    return run_dir


def expected_text(run_dir: Path, sequence: int) -> tuple[str, int, str]:
    """Return source, window and text of a sequence, from the shards' bytes."""
    tokens = []
    for name in ("a", "b"):
        shards = json.loads((run_dir.parent / name / "manifest.json").read_text())["shards"]
        files = [run_dir.parent / name / shard["file"] for shard in shards]
        tokens.append(np.concatenate([np.fromfile(file, "<u2") for file in files]))
    order = Order([(len(ids) - 1) // SEQ_LEN for ids in tokens], [0.5, 0.5], SEED)
    place = order(np.array([sequence]))
    source, window = int(place.source[0]), int(place.window[0])
    ids = tokens[source][window * SEQ_LEN : window * SEQ_LEN + SEQ_LEN + 1]
    tokenizer = AutoTokenizer.from_pretrained(run_dir.parent / "tokenizer")
    return "ab"[source], window, tokenizer.decode(ids.tolist())


def sequences_of(output: str) -> dict[int, tuple[str, str]]:
    """Return {sequence: (its heading, its text without the headings of documents)}."""
    found = {}
    for part in output.split("=== sequence ")[1:]:
        heading, _, body = part.partition(" ===\n")
        lines = [line for line in body.splitlines() if not line.startswith("--- document")]
        found[int(heading.partition(":")[0])] = heading, "".join(lines)
    return found


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--step", 3), [8, 9, 10, 11]),
        (("--step", 6), [32, 33, 34, 35]),
        (("--step", 12), [56, 57, 58, 59]),
        (("--sequences", "20-23"), [20, 21, 22]),
        (("--sequences", 7), [7]),
    ],
)
def test_batch_text_equals_the_text_of_its_windows(run_dir, words, expected) -> None:
    done = run_here(main, "decode-batch", run_dir, *words)
    assert done.returncode == 0, done.stderr
    found = sequences_of(done.stdout)
    assert list(found) == expected
    for sequence, (heading, text) in found.items():
        source, window, whole = expected_text(run_dir, sequence)
        assert f"source {source}, epoch 0, window {window}, documents " in heading
        assert text == whole.replace("\n", "")
    assert ".jsonl, byte " in done.stdout
    assert ("before rollback 1" in done.stdout) == (words == ("--step", 6))
    assert ("after the last step of the run, 10" in done.stdout) == (words == ("--step", 12))


def test_a_step_is_counted_from_the_checkpoint_before_it(run_dir) -> None:
    """A run resumed with another batch size reads other sequences in a step than a new run."""
    directory = run_dir / "checkpoints" / "step-00000007"
    directory.mkdir(parents=True)
    progress = vars(Progress(step=7, position=100))
    manifest = {"format": FORMAT, "version": VERSION, "progress": progress, "files": [], **WRITTEN}
    write_json(directory / "MANIFEST.json", {**manifest, "digest": manifest_digest(manifest)})
    done = run_here(main, "decode-batch", run_dir, "--step", 9)
    assert list(sequences_of(done.stdout)) == [116, 117, 118, 119]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--step", 0), "--step 0: steps are numbered from 1"),
        (("--sequences", "9-9"), "--sequences 9-9: A-B excludes B"),
        (("--sequences", "x-9"), "--sequences x-9: neither A-B nor a number"),
    ],
)
def test_invalid_arguments_are_refused(run_dir, words, expected) -> None:
    done = run_here(main, "decode-batch", run_dir, *words)
    assert done.returncode == 2 and expected in done.stderr
    assert "Traceback" not in done.stderr


def test_missing_and_changed_files_are_named(run_dir, tmp_path) -> None:
    def refused(directory: Path) -> str:
        done = run_here(main, "decode-batch", directory, "--step", 1)
        assert done.returncode == 2 and "Traceback" not in done.stderr
        return done.stderr

    assert "run.json: no such file" in refused(tmp_path)
    record = json.loads((run_dir / "run.json").read_text())
    write_json(tmp_path / "run.json", {**record, "data_fingerprint": "of other tokens"})
    assert "data_fingerprint: the token shards have changed" in refused(tmp_path)
    record["settings"]["data"] = ["elsewhere=1"]
    write_json(tmp_path / "run.json", record)
    assert "elsewhere" in refused(tmp_path)
    copy = run_dir.parent / "a" / "tokenizer"
    copy.rename(run_dir.parent / "gone")
    try:
        assert "tokenizer: no such directory" in refused(run_dir)
    finally:
        (run_dir.parent / "gone").rename(copy)
