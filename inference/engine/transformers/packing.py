"""Linear layers of a model on a CPU, with weights in the layout in which oneDNN multiplies them.

PyTorch hands a weight to the library as it lies in memory, row by row, and it is laid out anew or read with
stride in every step. Decoding reads each weight for a few rows of input, so this is most of what a step costs.
Packed once, float32 takes half of the time and bfloat16 two thirds, and of two rows and more each comes out the
same whatever is beside it. (Alone, a float32 row of more than 1,024 inputs is added up in another order; computing
two would make it the same and cost such layers a sixth of their time.) The operators are those that
``torch.compile`` puts in for frozen weights (``torch/_inductor/fx_passes/mkldnn_fusion.py``), without its compilation.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn

#: Rows of input for which the layout is chosen; measured best, or as good, from 1 to 256.
ROWS = 32


class PackedLinear(nn.Module):
    """What ``linear`` computes, from weights of its own; ``linear`` is not needed any more."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        # No parameter and no buffer: the layout can be neither saved nor moved to another device.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach().contiguous(), ROWS)
        self._bias = None if linear.bias is None else linear.bias.detach()

    def forward(self, rows: Tensor) -> Tensor:
        """``[..., in_features]`` to ``[..., out_features]``."""
        return cast(Tensor, torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], ""))


def pack_linear_layers(model: Any) -> int:
    """Replace the linear layers of a model that only infers; the number of them.

    None where the library is missing or does not know the model's type, and none of a subclass
    (quantised, or with adapters), which computes something else. Peak memory grows by one layer, and for good
    by an output layer that shares its weights with the embedding.
    """
    packed = 0
    # By name, so that nothing here holds a layer that has been packed: its weights would stay until the end.
    for module in [m for m in model.modules() if type(m) is not nn.Linear]:
        for name in [n for n, child in module.named_children() if type(child) is nn.Linear]:
            if _supported(getattr(module, name).weight):
                setattr(module, name, PackedLinear(getattr(module, name)))
                packed += 1
    return packed


def _supported(weight: Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32
