"""The functions of forward.py are the only ones that call the model of a run."""

import ast

from tests import ROOT, tracked

OTHER_MODELS = {  # they call a toy, a copy or an exported model
    "zerolm/attention/varlen.py",
    "zerolm/export/export.py",
    "zerolm/model/stages.py",
    "zerolm/plan/duration.py",
    "zerolm/preflight/expert_proof.py",
    "zerolm/preflight/model_proof.py",
    "zerolm/preflight/observed_model.py",
    "zerolm/preflight/trial_rows.py",
}


def test_no_other_module_calls_the_model_of_a_run() -> None:
    calling = set()
    for path in tracked("zerolm/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = {each.arg for each in node.keywords} if isinstance(node, ast.Call) else set()
            if named & {"input_ids", "use_cache"}:
                calling.add(str(path.relative_to(ROOT)))
    assert calling == OTHER_MODELS | {"zerolm/model/forward.py"}
