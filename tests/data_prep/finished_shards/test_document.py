"""Every command of docs/shards.md, run in order on small shards, as a user would."""

import re
import shlex

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.__main__ import main
from tests import ROOT
from tests.data_prep.encode.tokenized import documents_of
from tests.data_prep.finished_shards.conversions import write_megatron, write_peer_files
from tests.data_prep.finished_shards.corpus import write_corpus


def test_every_command_of_the_page_runs(tmp_path, monkeypatch, tokenizer_directory, capfd):
    (tmp_path / "shards").mkdir()
    one, _ = write_corpus(tmp_path, tokenizer_directory)
    one.rename(tmp_path / "shards/web")
    (tmp_path / "tokenizer").symlink_to(tokenizer_directory)
    (tmp_path / "climbmix").mkdir()
    rows = {"tokens": [[1, 2], [3]], "cluster_id": [1, 1]}
    pq.write_table(pa.table(rows), tmp_path / "climbmix/part_0.parquet")
    peers = write_peer_files(tmp_path / "peers")
    for ours, theirs in (("mds", "mds1"), ("litdata", "lit1")):
        (tmp_path / ours).mkdir()
        (peers / theirs).rename(tmp_path / ours / "web")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/shards.md").read_text(encoding="utf-8")
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "pyarrow" in block
    )
    exec(code, {})
    documents = documents_of(tmp_path / "shards/web")
    assert pq.read_table("web.parquet")["ids"].to_pylist() == documents
    for name in ("megatron", "nanogpt"):
        (tmp_path / name / "web").mkdir(parents=True)
    write_megatron(tmp_path / "megatron/web/tokens", documents)
    with open("nanogpt/web/train.bin", "wb") as file:  # as `cat` writes it
        for path in sorted((tmp_path / "shards/web").glob("shard-*.bin")):
            file.write(path.read_bytes())
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert len(lines) > 6
    for line in lines:
        words = shlex.split(line.replace("*.parquet", "part_0.parquet"), comments=True)
        assert words[:2] == ["zerolm", "data"]
        assert main(words[2:]) == 0, f"{line}\n{capfd.readouterr().err}"
    for form in ("megatron", "nanogpt", "parquet"):
        back = tmp_path / "shards" / f"web_{form}"
        assert documents_of(back) == documents, form
