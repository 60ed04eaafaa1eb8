"""`--fp8`: linear layers' matrix products in 8-bit floating point, only during training.

A product uses inputs and weights in e4m3 and gradients in e5m2, sums in float32, and returns its
result in the operands' original precision. Each tensor has one scale, which is computed from the
tensor's largest value at each use and rounded down to a power of two. So scaling itself never
rounds, and a value gets the same 8 bits whatever else is in its micro-batch (unless it is thousands
of times smaller than the largest value). The loss curve therefore does not depend on how a batch is
divided. Parameters, their names, checkpoints, exported models and evaluation do not change.

Source of the two formats: Micikevicius et al. 2022 (arXiv 2209.05433).
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from zerolm.engine.parameters import gathered_again

VALUES, GRADIENTS = torch.float8_e4m3fn, torch.float8_e5m2
MULTIPLE = 16  # cuBLAS's fp8 products need sizes that are multiples of this
SMALLEST = 2.0**-100  # lower bound for a tensor's largest value, so zeros have a finite scale
EXPONENT_BITS = 0x7F800000  # of a float32


class Fp8Linear(nn.Linear):
    """A linear layer that multiplies in fp8 during training."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        rows_NK = input.flatten(0, -2)
        # The product for the weight's gradient sums over the rows.
        missing = -len(rows_NK) % MULTIPLE
        if missing:
            rows_NK = functional.pad(rows_NK, (0, 0, 0, missing))
        output_NM = _Product.apply(rows_NK, self.weight)
        if missing:
            output_NM = output_NM[:-missing]
        output = output_NM.view(*input.shape[:-1], -1)
        return output if self.bias is None else output + self.bias


class _Product(torch.autograd.Function):
    """The product of an input (N, K) and a transposed weight (M, K), with its gradients."""

    @staticmethod
    def forward(ctx: Any, input_NK: torch.Tensor, weight_MK: torch.Tensor) -> torch.Tensor:
        quantized_NK, scale = quantize(input_NK, VALUES)
        # Save the parameter itself, because ZeRO-3 releases and regathers its values in between.
        ctx.save_for_backward(quantized_NK, scale, weight_MK)
        weight, weight_scale = quantize(weight_MK, VALUES)
        return _multiply(quantized_NK, scale, weight.t(), weight_scale, input_NK.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        input_NK, scale, weight_MK = ctx.saved_tensors
        gradient_NM, gradient_scale = quantize(gradients[0], GRADIENTS)
        with gathered_again(weight_MK):
            weight, weight_scale = quantize(weight_MK, VALUES)
        dtype = gradients[0].dtype
        of_input = _multiply(
            gradient_NM, gradient_scale, _column_major(weight), weight_scale, dtype
        )
        of_weight = _multiply(
            gradient_NM.t().contiguous(), gradient_scale, _column_major(input_NK), scale, dtype
        )
        return of_input, of_weight


def quantize(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the values in an fp8 dtype, row-major, and the float32 factor that restores the
    originals.

    The factor is the smallest power of two with which all values fit into the dtype. If a value is
    not finite, the factor or the quantized value is not finite either.
    """
    low, high = values.detach().aminmax()
    largest = torch.maximum(-low, high).float().clamp(min=SMALLEST)
    scale = torch.finfo(dtype).max / largest
    scale = (scale.view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    quantized = (values * scale).to(dtype, memory_format=torch.contiguous_format)
    return quantized, scale.reciprocal()


def _multiply(
    left: torch.Tensor,
    left_scale: torch.Tensor,
    right: torch.Tensor,
    right_scale: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    # Fast accumulation stays off, because it would not sum in float32.
    return torch._scaled_mm(left, right, scale_a=left_scale, scale_b=right_scale, out_dtype=dtype)


def _column_major(matrix: torch.Tensor) -> torch.Tensor:
    """Return the matrix in the layout that cuBLAS needs for the right operand."""
    return matrix.t().contiguous().t()
