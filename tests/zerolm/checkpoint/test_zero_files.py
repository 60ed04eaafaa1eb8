"""Weights read from files like those that DeepSpeed writes."""

import torch

from zerolm.checkpoint.zero_files import Weights


def test_frozen_parameters_of_stage_3_are_joined_from_the_files_of_all_ranks(tmp_path):
    """They have no master, and the module's state has an empty tensor in their place."""
    frozen, trained = torch.arange(7.0).view(7, 1), torch.arange(10.0, 14.0)
    padded = torch.cat([frozen.flatten(), torch.zeros(1)])
    for rank in range(2):
        state = {
            "module": {"table": torch.empty(0), "weight": torch.empty(0)},
            "param_shapes": [{"weight": trained.shape}],
            "frozen_param_shapes": {"table": frozen.shape},
            "frozen_param_fragments": {"table": padded.view(2, 4)[rank]},
            "shared_params": {},
            "buffer_names": [],
        }
        torch.save(state, tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
        shard = {
            "fp32_flat_groups": [trained.view(2, 2)[rank]],
            "optimizer_state_dict": {"state": {}, "param_groups": [{"params": [0]}]},
        }
        path = tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": shard}, path)
    weights = Weights(tmp_path, {"world_size": 2, "zero_stage": 3})
    assert torch.equal(weights["weight"], trained)
    assert torch.equal(weights["table"], frozen)
