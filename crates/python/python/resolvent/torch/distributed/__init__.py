"""Attention of sequences that are spread over processes, over ``torch.distributed``.

    out = resolvent.torch.distributed.attend(q, k, v, "linear")    # this process's tokens in, its rows out

Data-parallel training needs nothing of this: a converted model is one for ``torch.nn.parallel.DistributedDataParallel``.
"""

from __future__ import annotations

from .attention import attend, exchange_of
from .collectives import Traffic, traffic

__all__ = ["Traffic", "attend", "exchange_of", "traffic"]
