"""Values of a tensor rounded to an 8-bit format with one scale, by arithmetic in float64.

No fp8 type of torch is used: a value is rounded to a multiple of its format's spacing at its size.
"""

import math

import torch

# {format: (bits of the fraction, smallest normal exponent, largest value)}
FORMATS = {torch.float8_e4m3fn: (3, -6, 448.0), torch.float8_e5m2: (2, -14, 57344.0)}


def rounded(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float64 values, rounded as if scaled by the largest power of two that keeps them."""
    fraction_bits, smallest, limit = FORMATS[dtype]
    exact = values.detach().double()
    largest = exact.abs().max().item()
    if not largest:
        return exact
    scale = 2.0 ** math.floor(math.log2(limit / largest))
    scaled = exact * scale
    exponents = torch.frexp(scaled).exponent - 1
    spacing = torch.ldexp(torch.ones_like(exact), exponents.clamp(min=smallest) - fraction_bits)
    return torch.round(scaled / spacing) * spacing / scale  # ties to even


class EmulatedLinear(torch.nn.Linear):
    """A linear layer whose three products have rounded operands; `emulate` converts layers."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        output = _Product.apply(input, self.weight)
        return output if self.bias is None else output + self.bias


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, input, weight):
        values = rounded(input, torch.float8_e4m3fn), rounded(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(*values)
        return (values[0] @ values[1].T).to(input.dtype)

    @staticmethod
    def backward(ctx, gradient):
        input, weight = ctx.saved_tensors
        values = rounded(gradient, torch.float8_e5m2)
        of_weight = values.flatten(0, -2).T @ input.flatten(0, -2)
        return (values @ weight).to(gradient.dtype), of_weight.to(gradient.dtype)


def emulate(model: torch.nn.Module) -> None:
    """Convert all linear layers of a Llama but the head."""
    for name, layer in model.named_modules():
        if name.endswith("_proj"):
            layer.__class__ = EmulatedLinear
