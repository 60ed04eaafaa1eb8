"""Runs of what finds duplicates: `data_prep dedup`, datasketch and datatrove."""

import json
import struct
import subprocess
import sys
import time
from pathlib import Path

DATASKETCH = """
import json, re, sys
from datasketch import MinHash, MinHashLSH
lsh = MinHashLSH(threshold=0.8, num_perm=128)
pairs = []
for number, line in enumerate(open(sys.argv[1])):
    words = re.findall(r"\\w+", json.loads(line)["text"].lower())
    shingles = {" ".join(words[i : i + 13]).encode() for i in range(len(words) - 12)}
    if not shingles:
        continue
    signature = MinHash(num_perm=128)
    signature.update_batch(shingles)
    pairs += [[other, number] for other in lsh.query(signature)]
    lsh.insert(number, signature)
json.dump(pairs, open(sys.argv[2], "w"))
"""
DATATROVE = """
import sys
from datatrove.executor import LocalPipelineExecutor
from datatrove.pipeline.dedup.minhash import *
from datatrove.pipeline.readers import JsonlReader
from datatrove.utils.hashing import HashConfig
corpus, work = sys.argv[1:3]
# it passes a str to its default hash, xxhash, which xxhash 4 refuses
config = MinhashConfig(n_grams=13, hash_config=HashConfig(hash_fc="sha1"))
for pipeline, tasks in (
    ([JsonlReader(corpus), MinhashDedupSignature(work + "/signatures", config)], 1),
    ([MinhashDedupBuckets(work + "/signatures", work + "/buckets", config=config)], 14),
):
    LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=f"{work}/log{tasks}").run()
"""


def timed(command: list[str], limit_seconds: float = 3600) -> float:
    """Run a command; return its seconds. Raises subprocess.TimeoutExpired."""
    start = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, timeout=limit_seconds)
    if result.returncode:
        raise SystemExit(result.stdout + result.stderr)
    return time.perf_counter() - start


def found_pairs(
    corpus: Path, work: Path, peer_seconds: float
) -> dict[str, tuple[set[tuple[int, int]], float]]:
    """Return {contender: (pairs it calls duplicates, seconds in one process)}.

    Args:
        peer_seconds: time limit for datatrove, which is then left out.
    """
    from data_prep.read.stage_files import read_records

    found = {}
    ours = ["--input", str(corpus), "--output", str(work / "ours"), "--workers", "1"]
    seconds = timed([sys.executable, "-m", "data_prep", "dedup", *ours])
    notes = read_records(work / "ours" / "duplicates.jsonl.zst")
    pairs = {(min(note["id"], note["kept"]), max(note["id"], note["kept"])) for note in notes}
    found["data_prep dedup"] = pairs, seconds
    seconds = timed([sys.executable, "-c", DATASKETCH, str(corpus), str(work / "pairs.json")])
    pairs = {(one, two) for one, two in json.loads((work / "pairs.json").read_text())}
    found["datasketch"] = pairs, seconds
    try:
        seconds = timed([sys.executable, "-c", DATATROVE, str(corpus), str(work)], peer_seconds)
    except subprocess.TimeoutExpired:
        print(f"datatrove was stopped after {peer_seconds:,.0f} s.\n", flush=True)
        return found
    pairs = set()
    for path in (work / "buckets").glob("*.dups"):
        for _, one, _, two in struct.iter_unpack("<4I", path.read_bytes()):
            pairs.add((min(one, two), max(one, two)))
    found["datatrove"] = pairs, seconds
    return found
