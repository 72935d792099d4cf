"""Attention on PyTorch's CPU tensors: a differentiable function, operators for ``torch.compile`` and ``torch.export``,
modules with learned parameters, and the takeover of ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from .functional import attend
from .modules import Attention, MultiheadAttention
from .takeover import Report, accelerate

__all__ = ["Attention", "MultiheadAttention", "Report", "accelerate", "attend"]
