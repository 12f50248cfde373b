"""3x3 convolutions on small maps, as matrix products, on the CPU.

oneDNN's direct convolutions are made for maps of many positions. In a ResNet for 32x32 images the last stages have maps
of 4x4 and 2x2, a third of the arithmetic and, computed directly, half of the time, most of it for gradients of weights.
Here, with weights (C_out, C_in, 3, 3) in channels_last order, so that each tap's C_in numbers are contiguous:

- The gradient of the weights on maps of up to 4x4 outputs is a product for each of the nine taps, of the outputs'
  gradients and the inputs that the tap meets: (C_out, positions) x (positions, C_in), nothing computed on the padding.
- On a map of 2x2 every output meets every input through one tap. The convolution is one product,
  (batch, 4 C_in) x (4 C_in, 4 C_out), with a matrix of 16 copied taps, which takes 16 / 36 of the multiplications of
  the nine taps and their padding. The gradient of the inputs is one product, too.

The values are those of nn.Conv2d to rounding. On CUDA and on larger maps it is nn.Conv2d.
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn import functional as F

MAX_POSITIONS = 16  # outputs of a map; on 8x8 oneDNN's gradient of the weights is faster
MAX_SIDE = 2  # of a map for one product; on 4x4 most of the matrix would be zeros


class SmallMapConv2d(nn.Conv2d):
    """nn.Conv2d with 3x3 taps, padding 1, stride 1 or 2 and no bias; the same parameters, initialisation and state."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)

    def forward(self, maps: Tensor) -> Tensor:
        """Maps (batch, C_in, H, W) -> (batch, C_out, H / stride, W / stride), rounded up."""
        stride = self.stride[0]
        positions = -(maps.shape[2] // -stride) * -(maps.shape[3] // -stride)
        if maps.device.type != "cpu" or positions > MAX_POSITIONS:
            return super().forward(maps)
        dtype = maps.dtype
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
        return _Convolution.apply(maps.to(dtype), self.weight, stride)


class _Convolution(torch.autograd.Function):
    """The convolution of maps (batch, C_in, H, W), in their precision, with weight (C_out, C_in, 3, 3)."""

    @staticmethod
    def forward(ctx: FunctionCtx, maps: Tensor, weight: Tensor, stride: int) -> Tensor:
        height, width = maps.shape[2:]
        ctx.as_product = stride == 1 and max(height, width) <= MAX_SIDE
        ctx.stride = stride
        ctx.weight_dtype = weight.dtype
        if not ctx.as_product:
            weight = weight.to(maps.dtype)
            ctx.save_for_backward(maps, weight)
            return F.conv2d(maps, weight, stride=stride, padding=1)
        matrix = _matrix(weight, height, width, maps.dtype)
        ctx.save_for_backward(maps, matrix)
        outputs = _positions_last(maps).flatten(1) @ matrix.T  # (batch, H W C_out)
        return outputs.view(len(maps), height, width, len(weight)).permute(0, 3, 1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        maps, weight = ctx.saved_tensors  # (batch, C_in, H, W), and the weight or the matrix made of it
        maps_gradient = weight_gradient = None
        if ctx.needs_input_grad[0] and ctx.as_product:
            maps_gradient = _positions_last(gradient).flatten(1) @ weight  # (batch, H W C_in)
            maps_gradient = maps_gradient.view(len(maps), *maps.shape[2:], maps.shape[1]).permute(0, 3, 1, 2)
        elif ctx.needs_input_grad[0]:
            stride = [ctx.stride] * 2
            maps_gradient, _, _ = torch.ops.aten.convolution_backward(
                gradient, maps, weight, None, stride, [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]
            )
        if ctx.needs_input_grad[1]:
            weight_gradient = _weight_gradient(maps, gradient, ctx.stride, ctx.weight_dtype)
        return maps_gradient, weight_gradient, None


def _positions_last(maps: Tensor) -> Tensor:
    """(batch, C, H, W) -> (batch, H, W, C), for channels_last maps without a copy."""
    return maps.permute(0, 2, 3, 1)


def _matrix(weight: Tensor, height: int, width: int, dtype: torch.dtype) -> Tensor:
    """Return the matrix (H W C_out, H W C_in) of the convolution of maps of up to 2x2 with stride 1.

    The output at (row, column) meets the input at (r, c) through the tap (r - row + 1, c - column + 1).
    """
    taps = weight.permute(0, 2, 3, 1)  # (C_out, 3, 3, C_in)
    num_out, _, _, num_in = taps.shape
    matrix = taps.new_empty(height, width, num_out, height, width, num_in, dtype=dtype)
    for row in range(height):
        for column in range(width):
            matrix[row, column] = taps[:, 1 - row : 1 - row + height, 1 - column : 1 - column + width]
    return matrix.view(height * width * num_out, height * width * num_in)


def _weight_gradient(maps: Tensor, gradient: Tensor, stride: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient (C_out, C_in, 3, 3), channels_last, from the outputs' (batch, C_out, H', W')."""
    # Rows first, so that the rows of a tap are contiguous after its columns are gathered.
    inputs = maps.permute(2, 0, 3, 1)  # (H, batch, W, C_in)
    outputs = gradient.permute(2, 0, 3, 1)  # (H', batch, W', C_out)
    taps = maps.new_empty(outputs.shape[3], 3, 3, inputs.shape[3], dtype=dtype)  # (C_out, 3, 3, C_in)
    for j in range(3):
        out_columns, in_columns = _met(j, stride, inputs.shape[2], outputs.shape[2])
        tap_outputs = outputs[:, :, out_columns].contiguous()
        tap_inputs = inputs[:, :, in_columns].contiguous()
        for i in range(3):
            out_rows, in_rows = _met(i, stride, inputs.shape[0], outputs.shape[0])
            # (C_out, positions) x (positions, C_in)
            taps[:, i, j] = tap_outputs[out_rows].flatten(0, 2).T @ tap_inputs[in_rows].flatten(0, 2)
    return taps.permute(0, 3, 1, 2)


def _met(tap: int, stride: int, num_inputs: int, num_outputs: int) -> tuple[slice, slice]:
    """Along one axis, the outputs whose tap (0, 1 or 2) lies on the map, not on its padding, and the inputs there."""
    first = 1 if tap == 0 else 0
    end = min(num_outputs, (num_inputs - tap) // stride + 1)
    return slice(first, end), slice(first * stride + tap - 1, (end - 1) * stride + tap, stride)
