"""Names keep to the words of docs/architecture.md, where that can be tested."""

import ast
import re

import pytest

from tests import tracked

NO_RANKS = {"rank", "world_size", "num_ranks"}  # zerolm/data knows shards of a stream
STAGE = re.compile(r"stages?(?=_|$)")
# Their stages are those of a pipeline.
OF_PIPELINE = {
    "micro_batches", "engine_building", "checks", "stage_proof", "expert_proof", "summary",
}  # fmt: skip
OWN_STAGES = re.compile(r"zero_stage|data_stage|(^|_)stage_?[123]")


def names_in(tree: ast.AST) -> set[str]:
    """Return all names of parameters, variables, attributes, functions and classes."""
    found = set()
    for node in ast.walk(tree):
        found |= {node.arg} if isinstance(node, ast.arg) else set()
        found |= {node.id} if isinstance(node, ast.Name) else set()
        found |= {node.attr} if isinstance(node, ast.Attribute) else set()
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
    return found


@pytest.mark.parametrize("path", tracked("zerolm/data/*.py"), ids=lambda path: path.stem)
def test_the_data_stream_has_shards_and_no_ranks(path):
    assert not NO_RANKS & names_in(ast.parse(path.read_text()))


@pytest.mark.parametrize("room", ["data", "tracking", "report", "train", "preflight"])
def test_a_stage_is_one_of_zero_or_of_a_pipeline(room):
    for path in tracked(f"zerolm/{room}/*.py"):
        if path.stem in OF_PIPELINE:
            continue
        for name in names_in(ast.parse(path.read_text())):
            name = OWN_STAGES.sub("", name.lower())
            assert not STAGE.search(name), f"{path.name}: {name}: the mixture has blends"
