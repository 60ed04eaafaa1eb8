"""Every command of docs/shards.md, run in order on small shards, as a user would."""

import re
import shlex

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep.__main__ import main
from tests import ROOT
from tests.data_prep.shards.corpus import write_corpus


def test_every_command_of_the_page_runs(tmp_path, monkeypatch, tokenizer_directory, capfd):
    (tmp_path / "shards").mkdir()
    one, two = write_corpus(tmp_path, tokenizer_directory)
    one.rename(tmp_path / "shards/web")
    two.rename(tmp_path / "shards/code")
    (tmp_path / "tokenizer").symlink_to(tokenizer_directory)
    (tmp_path / "climbmix").mkdir()
    rows = {"tokens": [[1, 2], [3]], "cluster_id": [1, 1]}
    pq.write_table(pa.table(rows), tmp_path / "climbmix/part_0.parquet")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/shards.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```bash\n(.*?)```", page, re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line]
    assert len(lines) > 6
    for line in lines:
        line = line.replace("--min_length 1000", "--min_length 100")
        words = shlex.split(line.replace("*.parquet", "part_0.parquet"), comments=True)
        assert words[:2] == ["zerolm", "data"]
        assert main(words[2:]) == 0, f"{line}\n{capfd.readouterr().err}"
