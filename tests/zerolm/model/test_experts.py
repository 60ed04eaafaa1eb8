"""No causal LM of transformers keeps its experts in a list, which ZeRO-3 would gather in part."""

import importlib.util
import re
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as CAUSAL

# A class that is such a list, or an attribute that is given one.
LIST = re.compile(
    r"class \w*Expert\w*\((nn\.)?Module(List|Dict)\)|expert\w* = (nn\.)?Module(List|Dict)\("
)


def test_no_model_keeps_its_experts_in_a_list():
    """A list would need `set_z3_leaf_modules`: each rank gathers only the experts that it calls.

    test_mixtures_of_experts.py trains ranks that call different experts. If this test fails, a new
    model of transformers needs its block in `zero_optimization.leaf_module`.
    """
    models = Path(importlib.util.find_spec("transformers").origin).parent / "models"
    causal = {class_name for names in CAUSAL.values()
              for class_name in ([names] if isinstance(names, str) else names)}  # fmt: skip
    sources = {path.parent.name: path.read_text() for path in models.glob("*/modeling_*.py")}
    assert sum("xperts(nn.Module)" in source for source in sources.values()) > 20
    lists = {name for name, source in sources.items() if LIST.search(source)}
    assert lists == {"nllb_moe", "switch_transformers"}, "encoders and decoders: not built here"
    classes = set(re.findall(r"class (\w+)\(", "".join(sources[name] for name in lists)))
    assert not classes & causal
