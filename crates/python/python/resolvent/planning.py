"""What a call will do and need, before it is made."""

from __future__ import annotations

import dataclasses
import json
from typing import Sequence

from .errors import TensorError
from .mechanism import Mechanism, MechanismLike
from .threads import get_num_threads, number

__all__ = ["Plan", "plan"]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a call will do and need; lengths of buffers count float32 numbers."""

    strategy: str
    reason: str
    tile: tuple[int, int]
    flops_forward: int
    flops_backward: int
    exps_forward: int
    exps_backward: int
    bytes_forward: int
    bytes_backward: int
    scratch_forward: int
    scratch_backward: int
    stats: int
    allocated_forward: int
    allocated_backward: int
    precision: str
    """Of the products: ``full``, ``bf16`` or ``bf16x3``."""
    instructions: str
    """The instructions that compute them."""
    caution: str | None
    """What is allowed and likely a mistake at these sizes."""


def plan(
    q_shape: Sequence[int],
    mechanism: MechanismLike = "softmax",
    *,
    kv_tokens: int | None = None,
    value_dim: int | None = None,
    causal: bool = False,
    strategy: str = "auto",
    given_landmarks: int | None = None,
    precision: str = "full",
    threads: int | None = None,
) -> Plan:
    """The plan of a call with queries of shape ``[batch, heads, tokens, channels]``.

    Leading axes may be missing. Without ``kv_tokens`` and ``value_dim`` keys and values are as many and as wide as the queries. More
    ``threads`` hold more working memory; see `set_num_threads`.
    """
    if not 2 <= len(q_shape) <= 4:
        raise TensorError(
            f"tensor `q` has {len(q_shape)} axes; expected [batch, heads, tokens, channels]",
            code="shape",
            tensor="q",
            remedy="expected [batch, heads, tokens, channels]",
        )
    batch, heads, tokens, channels = (1,) * (4 - len(q_shape)) + tuple(q_shape)
    sizes = (
        batch,
        heads,
        tokens,
        tokens if kv_tokens is None else kv_tokens,
        channels,
        channels if value_dim is None else value_dim,
    )
    count = get_num_threads() if threads is None else number("threads", threads, 1, " or None")
    text, caution = Mechanism.of(mechanism)._core.plan(sizes, (causal, strategy, precision), given_landmarks, count)
    fields = json.loads(text)
    fields["tile"] = tuple(fields["tile"])
    fields["precision"], fields["instructions"] = fields["arithmetic"]["runs"], fields["arithmetic"]["instructions"]
    names = {field.name for field in dataclasses.fields(Plan)}
    return Plan(**{name: value for name, value in fields.items() if name in names}, caution=caution)
