"""`python -m data_prep tokenize`: nothing is lost or reordered, and it ends cleanly in any case."""

import hashlib
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
from golden_corpus import write_golden_corpus, write_golden_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_corpus import ROOT, TEXTS, data_prep, write_jsonl
from transformers import AutoTokenizer

from data_prep import shard_manifests
from data_prep.documents import Document
from data_prep.encoders import load_encoder
from data_prep.phases import LocalExecutor
from data_prep.sources import find_inputs
from data_prep.tokenization import TokenizeOptions, run_tokenization
from data_prep.tokenize import DocumentEncoder
from data_prep.tokenizers import load_tokenizer
from zerolm.errors import ZerolmError
from zerolm.excerpts import load_decoder
from zerolm.shards import ShardWriter, open_source


def documents_of(directory) -> list[list[int]]:
    """Read shards without this project's reader: documents as lists of ids."""
    manifest = json.loads((Path(directory) / "manifest.json").read_text())
    documents = []
    for shard in manifest["shards"]:
        ids = np.fromfile(Path(directory) / shard["file"], "<u2")
        ends = np.fromfile(Path(directory) / shard["index"], "<u8").astype(int)
        documents += [part.tolist() for part in np.split(ids, ends[:-1])]
    return documents


def reference_documents(tokenizer_directory, texts) -> list[list[int]]:
    """What transformers gives, document by document, with an EOS id."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_directory)
    return [
        tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
        + [tokenizer.eos_token_id]
        for text in texts
    ]


def held_out(text: str, fraction: float) -> bool:
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"zerolm-val").digest()
    return int.from_bytes(digest, "big") / 2**64 < fraction


def files_of(directory) -> dict[str, bytes]:
    """Return {name: content} of all files; of a manifest without the command that made it."""
    files = {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in Path(directory).rglob("*")
        if path.is_file()
    }
    if "manifest.json" in files:
        manifest = json.loads(files["manifest.json"])
        assert manifest.pop("command")[3] == "tokenize"
        files["manifest.json"] = json.dumps(manifest).encode()
    return files


def test_ids_are_those_of_transformers_and_every_document_ends_once(tmp_path, tokenizer_directory):
    """Several inputs, flags with dashes, small shards; the text that spells EOS does not end."""
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (tmp_path / "b.txt").write_text("one text file\n")
    result = data_prep(
        *("tokenize", "--input", tmp_path / "a.jsonl", "--input", tmp_path / "b.txt"),
        *("--tokenizer", tokenizer_directory, "--output", tmp_path / "s", "--shard-tokens=100"),
    )
    assert result.returncode == 0, result.stderr
    texts = [*TEXTS, "one text file\n"]
    assert documents_of(tmp_path / "s") == reference_documents(tokenizer_directory, texts)
    manifest = json.loads((tmp_path / "s" / "manifest.json").read_text())
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "s" / "tokenizer")
    assert manifest["vocab_size"] == len(tokenizer) == 300
    assert manifest["eos_id"] == tokenizer.eos_token_id
    assert len(manifest["shards"]) > 1 and manifest["inner_eos_ids"] == 0
    assert manifest["text_bytes"] == sum(len(text.encode()) for text in texts)
    assert manifest["inputs"][1] == {
        "input": str(tmp_path / "b.txt"),
        "num_files": 1,
        "size_bytes": 14,
    }
    for words in ("8 documents", "tokens per document", "bytes per token", "seconds", "MB/s"):
        assert words in result.stdout
    assert data_prep("verify", tmp_path / "s").returncode == 0


def test_outputs_are_identical_for_any_number_of_workers(tmp_path, tokenizer_directory):
    """Every byte of every file, with units enough for all workers."""
    rng = random.Random(1)
    texts = [" ".join(rng.choices(TEXTS, k=rng.randrange(20, 60))) for _ in range(900)]
    write_jsonl(tmp_path / "a.jsonl", texts)
    assert (tmp_path / "a.jsonl").stat().st_size > 1 << 22  # two units
    outputs = []
    for workers in (1, 2, 4):
        train, val = tmp_path / f"train{workers}", tmp_path / f"val{workers}"
        result = data_prep(
            *("tokenize", "--input", tmp_path / "a.jsonl", "--tokenizer", tokenizer_directory),
            *("--output", train, "--val_output", val, "--val_fraction", 0.1),
            *("--workers", workers, "--shard_tokens", "1e5"),
        )
        assert result.returncode == 0, result.stderr
        outputs.append((files_of(train), files_of(val)))
    assert outputs[0] == outputs[1] == outputs[2]
    assert len(outputs[0][0]) > 8
    found = documents_of(tmp_path / "train1"), documents_of(tmp_path / "val1")
    for side, documents in enumerate(found):
        chosen = [text for text in texts if held_out(text, 0.1) == bool(side)]
        assert documents == reference_documents(tokenizer_directory, chosen)
    assert 40 < len(found[1]) < 150


def run_here(texts, directory, tokenizer_directory, val_fraction=None):
    """Tokenize in this process; return the opened sources."""
    Path(directory).mkdir(exist_ok=True)
    outputs = [Path(directory) / name for name in ("train", "val")][
        : 1 + (val_fraction is not None)
    ]
    inputs, _ = find_inputs([str(write_jsonl(Path(directory) / "a.jsonl", texts))], "text")
    options = TokenizeOptions(encoder="tokenizers", val_fraction=val_fraction)
    tokenizer = load_tokenizer(str(tokenizer_directory))
    run_tokenization(inputs, tokenizer, outputs, options, LocalExecutor(1), {})
    return [open_source(output) for output in outputs]


def test_the_held_out_split_depends_on_the_text_alone(tmp_path, tokenizer_directory):
    """Not on order or neighbours; copies stay together; a larger fraction only adds."""
    texts = [f"text {number}" for number in range(300)]
    sides = {}
    for name, some, fraction in (
        ("all", texts, 0.2),
        ("shuffled", random.Random(2).sample(texts, 200) * 2, 0.2),
        ("more", texts, 0.4),
    ):
        _, val = run_here(some, tmp_path / name, tokenizer_directory, fraction)
        decode = load_decoder(tokenizer_directory)
        ids = [document[:-1] for document in documents_of(val.directory)]
        sides[name] = [decode(each) for each in ids]
    assert sides["all"] == [text for text in texts if held_out(text, 0.2)]
    assert set(sides["shuffled"]) <= set(sides["all"]) < set(sides["more"])
    assert all(sides["shuffled"].count(text) == 2 for text in set(sides["shuffled"]))


def test_any_text_survives_the_way_through_the_shards(tokenizer_directory):
    """Byte-level BPE: decoding a document's ids gives its text, whatever Unicode it is."""
    decode = load_decoder(tokenizer_directory)
    encoder = load_encoder(tokenizer_directory)
    documents_encoder = DocumentEncoder(0, 300, None)

    @given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=1))
    @settings(max_examples=60, deadline=None)
    def check(texts):
        read = [Document(text, 0, number) for number, text in enumerate(texts)]
        (batch,), inner = documents_encoder.encode(encoder, read)
        assert inner == 0 and batch.text_bytes == sum(len(text.encode()) for text in texts)
        with tempfile.TemporaryDirectory() as name:
            with ShardWriter(
                Path(name) / "s",
                vocab_size=300,
                eos_id=0,
                tokenizer={"name": "bpe", "fingerprint": "f"},
                shard_tokens=50,
            ) as writer:
                writer.add(batch.token_ids, np.cumsum(batch.lengths))
            documents = documents_of(Path(name) / "s")
        assert all(document.index(0) == len(document) - 1 for document in documents)
        assert [decode(document[:-1]) for document in documents] == texts

    check()


BROKEN = {
    "json.jsonl": (b'{"text": "a"}\n{"text": \n', ":2: not valid JSON"),
    "field.jsonl": (b'{"text": "a"}\n{"body": "b"}\n', ":2: no key 'text'"),
    "utf8.jsonl": (b'{"text": "a"}\n{"text": "\xff"}\n', ":2: not UTF-8"),
    "latin.txt": (b"one\ntwo \xe9\n", ":2: not UTF-8"),
    "cut.jsonl.gz": (
        b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xabV*I\xad",
        ":1: the compressed data ends too early",
    ),
    "empty.jsonl": (b'\n{"text": ""}\n', "would have no documents, of 0 read and 2 skipped"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_documents_are_refused_with_file_and_line(tmp_path, tokenizer_directory, name):
    content, named = BROKEN[name]
    (tmp_path / name).write_bytes(content)
    result = data_prep(
        *("tokenize", "--input", tmp_path / name, "--tokenizer", tokenizer_directory),
        *("--output", tmp_path / "s", "--workers", 1),
    )
    assert result.returncode == 2 and result.stdout == ""
    assert named in result.stderr and "Traceback" not in result.stderr
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert not (tmp_path / "s").exists()


def test_every_problem_of_a_command_is_shown_before_any_work(tmp_path, tokenizer_directory):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("")
    result = data_prep(
        *("tokenize", "--input", tmp_path / "absent.jsonl", tmp_path / "file"),
        *("--tokenizer", tmp_path / "none", "--output", tmp_path / "full"),
        *("--val_output", tmp_path / "full" / "val", "--workers", "many", "--shard_tokens", 0),
        *("--val_fraction", 1.5),
    )
    assert result.returncode == 2
    lines = result.stderr.splitlines()
    for words in (
        "--workers many: is not a whole number from 1",
        "--shard_tokens 0: is not a whole number from 1 up",
        "--val_fraction 1.5: is not a number between 0 and 1",
        "is not empty (it holds 'thesis.txt')",
        "one is inside the other",
        "absent.jsonl: no such file",
        "file is not one of .txt",
        "none: no such directory",
    ):
        assert sum(words in line for line in lines) == 1, (words, result.stderr)
    assert len(lines) == 8
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["file", "full", "thesis.txt"]


def test_finished_shards_are_never_overwritten(tmp_path, tokenizer_directory):
    (tmp_path / "a.txt").write_text("a")
    command = (
        *("tokenize", "--input", tmp_path / "a.txt", "--tokenizer", tokenizer_directory),
        *("--output", tmp_path / "s"),
    )
    assert data_prep(*command).returncode == 0
    before = files_of(tmp_path / "s")
    result = data_prep(*command)
    assert result.returncode == 2 and "already holds token shards" in result.stderr
    assert files_of(tmp_path / "s") == before


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--val_fraction", "0.1"], "--val_fraction: needs --val_output too"),
        (["--val_output", "v"], "--val_output: needs --val_fraction too"),
        (["--worker", "2"], '--worker is not a flag of it. Did you mean "--workers"?'),
        (["--val_fraction", "1e-9", "--val_output", "{tmp}/v"], "v: would have no documents"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(tmp_path, tokenizer_directory, words, named):
    (tmp_path / "a.txt").write_text("a")
    result = data_prep(
        *("tokenize", "--input", tmp_path / "a.txt", "--tokenizer", tokenizer_directory),
        *("--output", tmp_path / "s", *(word.format(tmp=tmp_path) for word in words)),
    )
    assert result.returncode == 2 and named in result.stderr, result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["a.txt"]


def test_it_says_which_output_is_published_when_the_other_cannot_be(
    tmp_path, tokenizer_directory, monkeypatch
):
    publish = shard_manifests.publish_all

    def publish_with_something_in_the_way(directories, manifests):
        (directories[1].directory / "manifest.json.tmp").mkdir()
        publish(directories, manifests)

    monkeypatch.setattr(shard_manifests, "publish_all", publish_with_something_in_the_way)
    with pytest.raises(ZerolmError) as caught:
        run_here([f"text {number}" for number in range(99)], tmp_path, tokenizer_directory, 0.3)
    assert f"Published: {tmp_path / 'val'}; not published: {tmp_path / 'train'}" in str(
        caught.value
    )
    assert open_source(tmp_path / "val").num_documents > 0
    assert not (tmp_path / "train" / "manifest.json").exists()


GOLDEN = {  # SHA-256 of the shards laid end to end, as release 0.1.0 wrote them
    ("train", ".bin", 12): "6e4ec0dd5a361b8bf1b43929b22990bbf9a8882ffde5590f13d43664b3345d2b",
    ("train", ".idx", 12): "313ec9b8585f66447e7fc3e0aadb06de3a9401a87b671b7151ef428eb7d2b5b7",
    ("val", ".bin", 2): "e17cf1c521543bfd2aa86c255c8ed7097a5f92bb8ba1e88e9235fcab44c32ef3",
    ("val", ".idx", 2): "4296cf3f4bc3a4144dcb7d83347d11d0363077d48791f78d514753f1bfc8ca0c",
}


@pytest.mark.parametrize("unit_bytes", [None, 50_000])
def test_the_same_input_gives_the_shards_of_the_first_release(tmp_path, unit_bytes):
    corpus = write_golden_corpus(tmp_path / "corpus")
    tokenizer = load_tokenizer(str(write_golden_tokenizer(tmp_path / "tokenizer")))
    outputs = [tmp_path / "train", tmp_path / "val"]
    options = TokenizeOptions(val_fraction=0.1, shard_tokens=100_000, unit_bytes=unit_bytes)
    inputs, _ = find_inputs([str(corpus)], "text")
    run_tokenization(inputs, tokenizer, outputs, options, LocalExecutor(1), {})
    for (name, suffix, count), sha256 in GOLDEN.items():
        paths = sorted((tmp_path / name).glob(f"*{suffix}"))
        content = b"".join(path.read_bytes() for path in paths)
        assert len(paths) == count and hashlib.sha256(content).hexdigest() == sha256


def test_a_full_disk_is_an_error_of_one_line(tmp_path, tokenizer_directory):
    """A limit on the size of files stands for it: the kernel fails the write in the same way."""
    limit = (tokenizer_directory / "tokenizer.json").stat().st_size
    write_jsonl(tmp_path / "a.jsonl", TEXTS * (limit // 10))
    result = subprocess.run(
        [
            *(sys.executable, "-m", "data_prep", "tokenize", "--workers", "1"),
            *("--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(tokenizer_directory)),
            *("--output", str(tmp_path / "s")),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1, result.stderr
    assert f"{tmp_path / 's'}: cannot be written" in result.stderr
    assert not (tmp_path / "s").exists()


@pytest.fixture
def endless(tmp_path, tokenizer_directory):
    """A tokenization that has written something and would go on for many seconds."""
    document = json.dumps({"text": "".join(TEXTS)}) + "\n"
    (tmp_path / "a.jsonl").write_text(document * (60_000_000 // len(document)))
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "data_prep", "tokenize", "--workers", "2"),
            *("--input", str(tmp_path / "a.jsonl"), "--tokenizer", str(tokenizer_directory)),
            *("--output", str(tmp_path / "s")),
        ],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # a shell's background job, as this suite may be, ignores it
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        if len(list((tmp_path / "s").glob("parts/encoded/*/*.json"))) >= 2:
            break
        time.sleep(0.02)
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=30)


def children_of(process) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def assert_all_gone(children) -> None:
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive


def test_a_killed_worker_ends_the_command_with_an_error(tmp_path, endless):
    children = children_of(endless)
    workers = [child for child in children if "tracker" not in " ".join(child.cmdline())]
    assert len(workers) == 2
    workers[1].kill()
    _, stderr = endless.communicate(timeout=60)
    assert endless.returncode == 1
    assert f"(pid {workers[1].pid}) was killed by SIGKILL" in stderr
    assert "the same command goes on from there" in stderr and "Traceback" not in stderr
    assert_all_gone(children)
    assert not (tmp_path / "s" / "manifest.json").exists()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["Ctrl-C", "SIGTERM"]
)
def test_a_stopped_command_leaves_no_process_and_says_how_to_go_on(tmp_path, endless, number, code):
    children = children_of(endless)
    if number == signal.SIGINT:
        os.killpg(endless.pid, number)  # as a terminal does: to everybody
    else:
        endless.send_signal(number)
    _, stderr = endless.communicate(timeout=60)
    assert endless.returncode == code and "Traceback" not in stderr, stderr
    assert "nothing is published" in stderr and "the same command goes on from there" in stderr
    assert_all_gone(children)
    assert not (tmp_path / "s" / "manifest.json").exists()


def test_workers_end_when_the_command_is_killed(tmp_path, endless):
    """And what it had written is no data, nor in the way of the next one."""
    children = children_of(endless)
    endless.kill()
    endless.wait(timeout=60)
    assert_all_gone(children)
    assert (tmp_path / "s" / "parts").exists()
    assert not (tmp_path / "s" / "manifest.json").exists()
    with ShardWriter(
        tmp_path / "s", vocab_size=300, eos_id=0, tokenizer={"name": "x", "fingerprint": "f"}
    ) as writer:
        writer.add(np.array([1, 0]))
    assert open_source(tmp_path / "s").num_tokens == 2


def peak_memory(pid: int) -> int:
    """Return the high-water mark of a process in KiB, 0 if it is gone.

    Not ru_maxrss, which a new program inherits from the process that started it.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return int(status.split("VmHWM:")[1].split()[0]) if "VmHWM:" in status else 0


def watch_memory(command: list[str]) -> tuple[int, int]:
    """Run a command; return the peaks in KiB of its process and of the largest of its children."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    peaks = [0, 0]
    try:
        while process.poll() is None:
            peaks[0] = max(peaks[0], peak_memory(process.pid))
            with suppress(psutil.Error):  # it has just ended
                for child in children_of(process):
                    peaks[1] = max(peaks[1], peak_memory(child.pid))
            time.sleep(0.01)
    finally:
        process.kill()
    assert process.wait() == 0
    return peaks[0], peaks[1]


def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """60 MB instead of 10 MB: neither the command nor its largest worker needs 8 MB more."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    line = (
        "a line of one hundred bytes, which this tokenizer takes for one token ...... " + "." * 22
    )
    backend = Tokenizer(models.WordLevel({"<|endoftext|>": 0, line: 1}, unk_token="<|endoftext|>"))
    backend.pre_tokenizer = pre_tokenizers.Split("\n", "removed")
    backend.add_special_tokens(["<|endoftext|>"])
    (tmp_path / "tokenizer").mkdir()
    backend.save(str(tmp_path / "tokenizer" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    document = json.dumps({"text": (line + "\n") * 50}) + "\n"
    peaks = []
    for megabytes in (10, 60):
        corpus = tmp_path / f"{megabytes}.jsonl"
        corpus.write_text(document * (megabytes * 10**6 // len(document)))
        command = [
            *(sys.executable, "-m", "data_prep", "tokenize", "--input", str(corpus)),
            *("--tokenizer", str(tmp_path / "tokenizer"), "--workers", "2"),
            *("--output", str(tmp_path / f"s{megabytes}"), "--encoder", "tokenizers"),
        ]
        peaks.append(watch_memory(command))
    for small, large in zip(*peaks, strict=True):
        assert large - small < 8 * 1024, f"KiB of the command and of its largest worker: {peaks}"
    assert min(map(min, peaks)) > 8 * 1024, "the memory of something else was measured"
