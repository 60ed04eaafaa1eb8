"""CPU kernels for the operators of `torch.nn.attention.varlen`, which have CUDA kernels only.

Only the two kernels are replaced: torch's function, its autograd rules, its shapes for the compiler
and its operators are those that a GPU uses. A reference attends to each document by itself.
"""

import torch
from torch.nn.attention import varlen

LENGTHS = []  # of the documents of each call


def _documents(query, key, value, boundaries, window, scale):
    """Yield of each document: its place, its query, key and value, (H, L, D), and its weights."""
    groups = query.shape[1] // key.shape[1]
    for start, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist(), strict=True):
        part = [each[start:end].transpose(0, 1) for each in (query, key, value)]
        part[1:] = [each.repeat_interleave(groups, 0) for each in part[1:]]
        place = torch.arange(end - start)
        distance = place[:, None] - place
        seen = (distance >= 0) & ((distance <= window[0]) | (window[0] < 0))
        scores = (part[0] @ part[1].transpose(1, 2) * scale).masked_fill(~seen, -torch.inf)
        yield slice(start, end), part, scores.softmax(-1)


def _checked(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size, scale):
    """Check what the CUDA kernel checks, or takes for granted; return the scale."""
    assert torch.equal(cu_seq_q, cu_seq_k) and cu_seq_q.dtype == torch.int32
    assert cu_seq_q.is_contiguous() and cu_seq_q[0] == 0 and cu_seq_q[-1] == len(query)
    lengths = cu_seq_q.diff().tolist()
    assert min(lengths) > 0 and max(lengths) <= min(max_q, max_k)
    assert query.shape[2] % 8 == 0 and query.shape[2] <= 256 and query.shape[1] % key.shape[1] == 0
    assert key.shape == value.shape and key.shape[::2] == query.shape[::2]
    assert {each.dtype for each in (query, key, value)} == {query.dtype}
    assert all(each.stride(-1) == 1 for each in (query, key, value))
    assert window_size[1] == 0 and window_size[0] >= -1
    LENGTHS.append(lengths)
    return query.shape[2] ** -0.5 if scale is None else scale


def forward(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k,
    is_causal=False, scale=None, window_size=None, *others,
):  # fmt: skip
    scale = _checked(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size, scale)
    assert is_causal == (list(window_size) == [-1, 0])
    assert all(each is None for each in others[1:])
    output = torch.empty(query.shape, dtype=query.dtype)
    for place, part, weights in _documents(query, key, value, cu_seq_q, window_size, scale):
        output[place] = (weights @ part[2]).transpose(0, 1)
    sums = torch.zeros(query.shape[1], len(query))
    return output, sums, torch.zeros(2, dtype=torch.uint64)


def backward(
    grad_out, query, key, value, out, lse, cu_seq_q, cu_seq_k, max_q, max_k, is_causal, rng_state,
    scale=None, window_size=None,
):  # fmt: skip
    scale = _checked(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, window_size, scale)
    grad_query, grad_key, grad_value = (torch.empty_like(query) for _ in range(3))
    for place, part, weights in _documents(query, key, value, cu_seq_q, window_size, scale):
        grad = grad_out[place].transpose(0, 1)
        grad_weights = grad @ part[2].transpose(1, 2)
        centered = grad_weights - (weights * grad_weights).sum(-1, keepdim=True)
        grad_scores = weights * centered * scale
        grad_query[place] = (grad_scores @ part[1]).transpose(0, 1)
        grad_key[place] = (grad_scores.transpose(1, 2) @ part[0]).transpose(0, 1)
        grad_value[place] = (weights.transpose(1, 2) @ grad).transpose(0, 1)
    by_group = (*key.shape[:2], -1, key.shape[2])
    return grad_query, *(each.view(by_group).sum(2) for each in (grad_key, grad_value))


# By name, so that a test can replace them.
varlen._varlen_attn.register_kernel("cpu")(lambda *given: forward(*given))
varlen._varlen_attn_backward.register_kernel("cpu")(lambda *given: backward(*given))
