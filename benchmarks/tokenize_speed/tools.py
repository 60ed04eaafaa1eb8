"""The tools that benchmarks/tokenize_speed compares, each used as documented.

    python -m benchmarks.tokenize_speed.tools TOOL DIRECTORY OUT WORKERS

DIRECTORY has corpus-0.jsonl, corpus-1.jsonl, ... (one per worker) and tokenizer/. Every tool writes
the token IDs of every document, each followed by an EOS ID; `ids_of` reads them in order.
"""

import multiprocessing
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

BATCH_CHARACTERS = 1 << 20
TEXT_BATCH = 1000
RAW = ("raw-tokenizers", "raw-gigatoken")
EOS = "<|endoftext|>"


def raw(name: str, directory: Path, out: Path, workers: int) -> None:
    """The minimal program: one process per file, texts in batches, written once."""
    context = multiprocessing.get_context("spawn")
    jobs = [
        context.Process(target=_raw, args=(name, directory, number, out / f"{number}.bin"))
        for number in range(workers)
    ]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
        assert job.exitcode == 0, f"{name} ended with {job.exitcode}"


def _raw(name: str, directory: Path, number: int, path: Path) -> None:
    import orjson

    file = str(directory / "tokenizer" / "tokenizer.json")
    if name == "raw-gigatoken":
        import gigatoken

        backend = gigatoken.Tokenizer(file)

        def encode(texts):  # without batches, for which it imports awkward, in 0.5 s
            ids = [backend.encode(text) for text in texts]
            return np.concatenate(ids), np.cumsum([len(each) for each in ids])
    else:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        import tokenizers

        library = tokenizers.Tokenizer.from_file(file)

        def encode(texts):
            ids = [each.ids for each in library.encode_batch_fast(texts, add_special_tokens=False)]
            return np.concatenate(ids), np.cumsum([len(each) for each in ids])

    with open(directory / f"corpus-{number}.jsonl", "rb") as lines, open(path, "wb") as output:
        texts, size = [], 0
        for line in lines:
            texts.append(orjson.loads(line)["text"])
            size += len(texts[-1])
            if size >= BATCH_CHARACTERS:
                _write(output, *encode(texts))
                texts, size = [], 0
        if texts:
            _write(output, *encode(texts))
        output.flush()
        os.fsync(output.fileno())


def _write(output, ids: np.ndarray, ends: np.ndarray) -> None:
    output.write(np.insert(ids.astype(np.uint16), ends, 0).tobytes())  # the EOS ID is 0


def datatrove(directory: Path, out: Path, workers: int) -> None:
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(directory), glob_pattern="corpus-*.jsonl"),
            DocumentTokenizer(
                str(out / "ids"),
                str(directory / "tokenizer" / "tokenizer.json"),
                eos_token=EOS,
                shuffle_documents=False,
            ),
        ],
        tasks=workers,
        workers=workers,
        logging_dir=str(out / "logs"),
    ).run()


def datasets_map(directory: Path, out: Path, workers: int) -> None:
    import datasets
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(directory / "tokenizer"), trust_remote_code=False)
    eos = tokenizer.eos_token_id

    def encode(batch):
        ids = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False)
        return {"input_ids": [[*each, eos] for each in ids["input_ids"]]}

    data = datasets.load_dataset(
        "json",
        data_files=[str(directory / f"corpus-{number}.jsonl") for number in range(workers)],
        split="train",
        cache_dir=str(out / "cache"),
    )
    data = data.map(
        encode, batched=True, batch_size=TEXT_BATCH, num_proc=workers, remove_columns=["text"]
    )
    data.save_to_disk(str(out / "ids"), num_proc=workers)


def ids_of(tool: str, out: Path) -> Iterator[np.ndarray]:
    """Yield the token IDs that a tool wrote, in the order of the documents."""
    if tool in RAW or tool.startswith("zerolm") or tool == "datatrove":
        pattern = "*.bin" if tool in RAW else "ids/*.ds" if tool == "datatrove" else "shards/*.bin"
        for path in sorted(out.glob(pattern)):
            yield np.fromfile(path, np.uint16)
    else:
        import pyarrow as pa

        for path in sorted((out / "ids").glob("*.arrow")):
            with pa.memory_map(str(path)) as source:
                for batch in pa.ipc.open_stream(source):
                    column = batch.column(batch.schema.get_field_index("input_ids"))
                    yield column.flatten().to_numpy(zero_copy_only=False).astype(np.uint16)


def main() -> None:
    tool, directory, out, workers = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), sys.argv[4]
    if tool in RAW:
        raw(tool, directory, out, int(workers))
    else:
        {"datatrove": datatrove, "datasets.map": datasets_map}[tool](directory, out, int(workers))


if __name__ == "__main__":
    main()
