"""Stand-ins on a CPU for attention kernels that need a GPU, to compare the logits of small models.

transformers passes arguments to a kernel, or drops them without a message, by the parameters of the
kernel's functions. A stand-in has the same parameters, and computes softmax attention in torch.
Must not depend on settings.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from inspect import Parameter, Signature
from typing import Any
from unittest import mock

import torch

from zerolm.attention import flash, varlen
from zerolm.config.settings import VARLEN
from zerolm.engine import replaced

FLEX = "flex_attention"
# Parameters of the packages' functions that change the result, besides causal and softmax_scale:
# flash_attn_varlen_func of flash-attn 2.8.3.post2, of hopper/ in its sources, and of flash-attn-4
# 4.0.0b36.
PARAMETERS = {
    2: ("dropout_p", "window_size", "softcap", "deterministic", "block_table"),
    3: ("window_size", "softcap", "deterministic"),
    4: ("window_size", "softcap", "deterministic", "learnable_sink", "page_table"),
}


@contextmanager
def runs_on_cpu(kernel: str) -> Iterator[None]:
    """Inside this context, models in float32 on a CPU can use the kernel, or its stand-in."""
    from transformers import PreTrainedModel
    from transformers import modeling_flash_attention_utils as utils
    from transformers.integrations import flash_attention
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if kernel == FLEX:
        with torch.compiler.set_stance("force_eager"):  # compiling takes half a minute
            yield
    elif kernel == VARLEN:
        varlen.register()
        attend = partial(varlen.attend, _varlen)
        with mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {VARLEN: attend}):
            yield
    elif version := flash.VERSIONS.get(kernel):
        functions = (_flash(version), _flash_varlen(version), None, None, None)
        with (
            replaced.installed(utils, "_lazy_imports", lambda *_, **__: functions),
            replaced.installed(utils, "_loaded_implementation", None),
            replaced.installed(
                PreTrainedModel, "_check_and_adjust_attn_implementation", _any_kernel
            ),
            replaced.installed(flash_attention, "get_target_dtype", lambda *_: None),
            mock.patch.dict(ALL_ATTENTION_FUNCTIONS._global_mapping, {kernel: flash.attend}),
        ):
            yield
    else:
        yield


def _any_kernel(model: Any, kernel: str, *_: Any, **__: Any) -> str:
    return kernel  # transformers would look for the package


def _attention(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKD: torch.Tensor,
    boundaries: torch.Tensor,
    *,
    scale: float | None,
    causal: bool = True,
    window: tuple[int | None, int | None] = (-1, -1),
    softcap: float = 0.0,
    sinks_H: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute attention within documents: (N, H, D).

    Args:
        window: number of keys before and after a query's own that it attends to; -1 or None: all.
    """
    count, heads, width = query_NHD.shape
    key, value = (
        each.repeat_interleave(heads // each.shape[1], 1) for each in (key_NKD, value_NKD)
    )
    scores_HNN = torch.einsum("nhd,mhd->hnm", query_NHD, key) * (scale or width**-0.5)
    if softcap:
        scores_HNN = softcap * torch.tanh(scores_HNN / softcap)
    place = torch.arange(count)
    document = torch.searchsorted(boundaries.long(), place, right=True)
    distance = place[:, None] - place
    seen = document[:, None] == document
    before, after = (-1 if side is None else side for side in window)
    seen &= (distance >= 0) | (not causal)
    seen &= ((distance <= before) | (before < 0)) & ((-distance <= after) | (after < 0))
    scores_HNN = scores_HNN.masked_fill(~seen, -torch.inf)
    if sinks_H is not None:
        sinks = sinks_H[:, None, None].expand(-1, count, 1).to(scores_HNN.dtype)
        scores_HNN = torch.cat([scores_HNN, sinks], -1)
    weights = scores_HNN.softmax(-1)[..., :count]
    return torch.einsum("hnm,mhd->nhd", weights, value).contiguous()


def _varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    *_: Any,
    scale: float,
    window_size: tuple[int, int],
) -> torch.Tensor:
    return _attention(query, key, value, boundaries, scale=scale, window=window_size)


def _flash_varlen(version: int) -> Callable[..., torch.Tensor]:
    def function(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor, **given: Any
    ) -> torch.Tensor:
        return _attention(
            q,
            k,
            v,
            cu_seqlens_q,
            scale=given.get("softmax_scale"),
            causal=given.get("causal", False),
            window=given.get("window_size", (-1, -1)),
            softcap=given.get("softcap", 0.0),
            sinks_H=given.get("learnable_sink"),
        )

    names = ("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
    known = (*names, "softmax_scale", "causal", *PARAMETERS[version])
    signature = Signature([Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in known])
    vars(function)["__signature__"] = signature  # transformers reads it
    return function


def _flash(version: int) -> Callable[..., torch.Tensor]:
    function = _flash_varlen(version)

    def of_rows(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        boundaries = torch.arange(0, q.shape[0] * q.shape[1] + 1, q.shape[1])
        flat = (each.flatten(0, 1) for each in (q, k, v))
        output: torch.Tensor = function(*flat, boundaries, **given)
        return output.view(*q.shape[:2], *output.shape[1:])

    return of_rows
