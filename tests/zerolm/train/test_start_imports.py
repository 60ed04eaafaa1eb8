"""What a rank imports before its first step: no heavy package without a reason."""

import json
import subprocess
import sys

import pytest

from tests import ROOT
from zerolm.train.node_launcher import MODULES

ABSENT = (
    "aiohttp", "datasets", "lm_eval", "matplotlib", "networkx", "pandas", "pyarrow", "sklearn",
    "tensorboard", "torchvision", "wandb",
)  # fmt: skip
# Who imports it, although a run does not use it. Versions: torch 2.13, transformers 5.23.
WHY = {
    "accelerate": "transformers.integrations.accelerate, if it is installed (zerolm[dev])",
    "boto3": "accelerate's questionnaire for SageMaker, if both are installed (zerolm[s3])",
    "PIL": "transformers.utils.chat_template_utils, if it is installed",
    "scipy": "transformers.loss.loss_for_object_detection, if it is installed (zerolm[dev])",
    "sympy": "torch.fx",
    "torch._dynamo": "transformers.masking_utils, and torch's optimizers",
    "torch._inductor": "torch._dynamo",
    "torch.distributed.tensor": "torch.distributed.fsdp",
    "triton": "torch, if it is installed",
}
PROGRAM = """import importlib, json, sys
for name in sys.argv[1:]:
    importlib.import_module(name)
from zerolm.engine import muon
muon.import_uncompiled()
from deepspeed.runtime.zero.muon import muon_optimizer, original_muon
assert original_muon.compiler.compile.__module__ == "deepspeed.runtime.compiler"
print(json.dumps(sorted(sys.modules)))
"""


@pytest.fixture(scope="module")
def loaded():
    names = [*MODULES, "transformers.models.llama.modeling_llama"]
    command = [sys.executable, "-c", PROGRAM, *names]
    done = subprocess.run(
        command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True, timeout=120
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_start_imports_no_package_for_something_else(loaded):
    assert not loaded & set(ABSENT)
    families = {name.split(".")[2] for name in loaded if name.startswith("transformers.models.")}
    assert families <= {"auto", "llama", "encoder_decoder"}, "those of other models"


def test_heavy_packages_have_a_reason(loaded):
    """A package of more than 100 modules is worth a tenth of a second in each process."""
    sizes: dict[str, int] = {}
    for name in loaded:
        top = name.partition(".")[0]
        sizes[top] = sizes.get(top, 0) + 1
    needed = {"deepspeed", "numpy", "torch", "transformers", "zerolm"} | sys.stdlib_module_names
    heavy = {name for name, size in sizes.items() if size > 100} - needed
    assert heavy <= set(WHY), "find out who imports it"
