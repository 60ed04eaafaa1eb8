"""Where a rank's values of a parameter are, from what DeepSpeed notes at a parameter."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ds_config_checks import check_in_ranks
from zerolm.engine.parameters import residence


@pytest.mark.parametrize(("rank", "start", "length"), [(0, 0, 4), (1, 4, 3), (2, 7, 0)])
def test_a_partition_of_zero_3_has_no_padding(rank, start, length, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: rank)
    parameter: Any = torch.nn.Parameter(torch.empty(0))
    parameter.ds_numel, parameter.ds_shape, parameter.ds_process_group = 7, torch.Size([7]), "all"
    parameter.ds_tensor = torch.zeros(4)
    parameter.ds_tensor.ds_numel = 4
    assert residence(parameter) == ("all", None, start, length, (7,))


def test_a_matrix_of_tensor_parallelism_is_divided_on_one_dimension(monkeypatch):
    from deepspeed.utils import groups

    monkeypatch.setattr(groups, "get_tensor_model_parallel_group", lambda: "pair")
    monkeypatch.setattr(torch.distributed, "get_rank", lambda group: 1)
    for dim, start, shape in ((0, 2, (5, 6)), (1, 3, (5, 6))):
        parameter: Any = torch.nn.Parameter(torch.empty((3, 6) if dim == 0 else (5, 3)))
        parameter.tensor_model_parallel = True
        sizes = (2, 3) if dim == 0 else (3, 3)
        parameter.ds_autotp_universal_checkpoint_meta = {
            "partition_dim": dim, "partition_sizes": sizes, "logical_shape": shape,
        }  # fmt: skip
        assert residence(parameter) == ("pair", dim, start, 3, shape)


def test_any_other_parameter_is_complete():
    parameter = torch.nn.Parameter(torch.empty(2, 3))
    assert residence(parameter) == (None, None, 0, 6, (2, 3))


FORMS = {
    "stage 3": ({"zero_optimization": {"stage": 3}}, [[True, None]]),
    "tensor": (
        {"zero_optimization": {"stage": 1}, "tensor_parallel": {"autotp_size": 2}},
        [[False, None], [True, 0], [True, 1]],
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_an_engine_has_the_values_of_the_residence(form, tmp_path):
    config, dims = FORMS[form]
    config |= {"train_micro_batch_size_per_gpu": 1}
    config |= {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    worker = Path(__file__).with_name("residence_worker.py")
    assert check_in_ranks(worker, tmp_path, {form: config}) == {form: {"wrong": [], "dims": dims}}
