"""Attention on PyTorch's CPU tensors: a differentiable function, operators for ``torch.compile`` and ``torch.export``,
modules with learned parameters, and the takeover of ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from .attention import Attention, HeadAttention
from .functional import attend, attend_varlen
from .modules import MultiheadAttention
from .takeover import Report, accelerate

__all__ = ["Attention", "HeadAttention", "MultiheadAttention", "Report", "accelerate", "attend", "attend_varlen"]
