"""Attention of given queries, keys and values, with what the mechanism learns."""

from __future__ import annotations

from typing import Any, Iterable

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, UnsupportedError
from ..fits import HeadMechanisms
from ..mechanism import Mechanism, MechanismLike, Sizes
from .functional import attend
from .heads import by_group

__all__ = ["Attention", "HeadAttention", "parts_of"]

#: Learned values without bounds that stand for parameters with bounds: suffix, map and its inverse.
_MAPS: dict[str, tuple[str, float]] = {
    "gamma": ("_logit", 0.0),
    "alpha": ("_logit", 1.0),
    "kappa": ("_log", 0.0),
    "lambda": ("_log", 0.0),
    "scale": ("_log", 0.0),
}
#: Numbers of a bias by distance begin as in "Swin Transformer: Hierarchical Vision Transformer using Shifted Windows".
_TABLE_DEVIATION = 0.02
#: Tokens of the call that shapes of parameters are asked for; what is learned does not depend on them.
_TOKENS = 4096


def _refused(what: str, why: str) -> UnsupportedError:
    return UnsupportedError(f"{what} is not supported: {why}", code="unsupported", field=what, remedy=why)


class Attention(nn.Module):
    """Attention of queries, keys and values that are given, with what the mechanism learns.

    A parameter that has bounds is learned as a value without any, as in the project's Rust modules: ``gamma`` and ``alpha`` by
    ``gamma_logit`` and ``alpha_logit``, ``kappa``, ``lambda`` and ``scale`` by their logarithms ``kappa_log``, and so on.
    `values` gives the parameters themselves.

    Args:
        heads: Heads of the calls.
        head_dim: Channels of a query and a key.
        mechanism: A `Mechanism`, a preset's id, JSON or a mapping.
        value_dim: Channels of a value; ``head_dim`` by default.
        causal: Whether queries see no later key.
        learned: Names of the parameters that are learned; by default all that the mechanism has, but for a decay that is
            configured as 1. Those without configured values are learned in any case.
        dropout: Probability by which each weight is left out in training.
        codebook: Fixed centroids ``[heads, clusters, head_dim]``, a buffer.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        mechanism: MechanismLike = "softmax",
        *,
        value_dim: int | None = None,
        causal: bool = False,
        learned: Iterable[str] | None = None,
        dropout: float = 0.0,
        codebook: Tensor | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.mechanism = Mechanism.of(mechanism)
        self.heads, self.head_dim, self.value_dim = heads, head_dim, head_dim if value_dim is None else value_dim
        self.causal, self.dropout = causal, dropout
        document = self.mechanism.to_dict()
        bias = document.get("bias") or {}
        grid = document.get("grid") or ([bias["height"], bias["width"]] if bias.get("kind") == "grid" else None)
        tokens = grid[0] * grid[1] if grid else (document.get("structure") or {}).get("max_tokens") or _TOKENS
        sizes = (1, heads, tokens, tokens, head_dim, self.value_dim)
        self.learned = self._names(learned, sizes)
        # Values are looked at before they go where modules are made, which may be where there are none.
        device = torch.get_default_device() if device is None else device
        for name in self.learned:
            start = torch.tensor(self.mechanism._core.parameter_default(name, sizes), dtype=torch.float32, device="cpu")
            start = start.reshape(self.mechanism.parameter_shape(name, sizes))
            if name == "bias" and name in self.mechanism.required_parameters:
                nn.init.normal_(start, std=_TABLE_DEVIATION)
            self.register_parameter(_stored(name), nn.Parameter(_free(name, start).to(device=device, dtype=dtype)))
        self.register_buffer("codebook", codebook)
        self.codebook: Tensor | None

    def _names(self, learned: Iterable[str] | None, sizes: Sizes) -> tuple[str, ...]:
        own, required = self.mechanism.parameters, self.mechanism.required_parameters
        if "given_landmarks" in own:
            raise _refused("landmarks of kind given", "they are other in every call; use `attend`")
        if "key_map" in own and self.mechanism.to_dict()["structure"]["max_tokens"] is None:
            raise _refused("maps without max_tokens in a module", "it learns a column for every token; set structure.max_tokens")
        if (self.mechanism.to_dict().get("bias") or {}).get("kind") == "tensor":
            raise _refused("a bias of kind tensor in a module", "it comes with a call; pass `bias`")
        if learned is None:
            default = self.mechanism._core.parameter_default
            return tuple(n for n in own if n in required or n != "gamma" or max(default(n, sizes)) < 1.0)
        listed = set(learned)
        if unknown := sorted(listed - set(own)):
            remedy = f"it has {', '.join(own) or 'none'}"
            raise ConfigurationError(
                f"`{self.mechanism}` has no parameter `{unknown[0]}`; {remedy}",
                code="argument",
                field="learned",
                remedy=remedy,
            )
        return tuple(n for n in own if n in listed or n in required)

    def values(self) -> dict[str, Tensor]:
        """The learned parameters, within their bounds."""
        return {name: _bounded(name, getattr(self, _stored(name)).float()) for name in self.learned}

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        causal: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """See `attend`; ``causal`` adds to the module's."""
        return attend(
            q,
            k,
            v,
            self.mechanism,
            causal=self.causal or causal,
            key_mask=key_mask,
            query_mask=query_mask,
            bias=bias,
            parameters=self.values(),
            codebook=self.codebook,
            dropout=self.dropout if self.training else 0.0,
        )

    def extra_repr(self) -> str:
        causal = ", causal" if self.causal else ""
        learned = f", learned={list(self.learned)}" if self.learned else ""
        return f"{self.heads}, {self.head_dim}, {self.mechanism}{causal}{learned}"


class HeadAttention(nn.Module):
    """`Attention` for heads with mechanisms of their own: ``groups`` are its parts, in the order of the mechanisms' groups.

    Parameters and centroids are the groups', under their numbers: ``groups.0.gamma_logit``. A tied group leaves the keys out.

    Args:
        heads: Heads of the calls, as many as have mechanisms.
        head_dim: Channels of a query and a key.
        mechanism: Which heads have which mechanism.
        value_dim, causal, dropout: As in `Attention`.
        learned: Names of the parameters that are learned in groups that have them; by default as in `Attention`.
    """

    def __init__(
        self,
        heads: int,
        head_dim: int,
        mechanism: HeadMechanisms,
        *,
        value_dim: int | None = None,
        causal: bool = False,
        learned: Iterable[str] | None = None,
        dropout: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if mechanism.heads != heads:
            remedy = "give every head one"
            message = f"argument `mechanism` has {mechanism.heads} heads beside {heads}; {remedy}"
            raise ConfigurationError(message, code="argument", field="mechanism", remedy=remedy)
        self.mechanism, self.causal = mechanism, causal
        self.heads, self.head_dim, self.value_dim = heads, head_dim, head_dim if value_dim is None else value_dim
        listed = None if learned is None else set(learned)
        if listed is not None and (unknown := sorted(listed - set(mechanism.parameters))):
            remedy = f"they have {', '.join(mechanism.parameters) or 'none'}"
            message = f"no head's mechanism has a parameter `{unknown[0]}`; {remedy}"
            raise ConfigurationError(message, code="argument", field="learned", remedy=remedy)
        options: dict[str, Any] = {"value_dim": value_dim, "device": device, "dtype": dtype}
        parts = []
        for group in mechanism.groups:
            own = None if listed is None else listed & set(group.mechanism.parameters)
            parts.append(Attention(len(group.heads), head_dim, group.mechanism, learned=own, **options))
        self.groups = nn.ModuleList(parts)
        self.dropout = dropout

    @property
    def dropout(self) -> float:
        """Probability by which each weight is left out in training, in all groups."""
        return self._dropout

    @dropout.setter
    def dropout(self, dropout: float) -> None:
        self._dropout = dropout
        for _, part in parts_of(self):
            part.dropout = dropout

    def forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor,
        key_mask: Tensor | None = None,
        query_mask: Tensor | None = None,
        *,
        causal: bool = False,
        bias: Tensor | None = None,
    ) -> Tensor:
        """See `attend`; ``causal`` adds to the module's."""

        def call(n: int, q: Tensor, k: Tensor | None, v: Tensor, bias: Tensor | None) -> Tensor:
            out: Tensor = self.groups[n](q, k, v, key_mask, query_mask, causal=self.causal or causal, bias=bias)
            return out

        return by_group(self.mechanism, q, k, v, bias, call)

    def extra_repr(self) -> str:
        causal = ", causal" if self.causal else ""
        return f"{self.heads}, {self.head_dim}, {self.mechanism}{causal}"


def parts_of(attention: Attention | HeadAttention) -> list[tuple[tuple[int, ...], Attention]]:
    """The modules that have one mechanism each, with the heads that they are for."""
    if isinstance(attention, Attention):
        return [(tuple(range(attention.heads)), attention)]
    # What the list holds is made above.
    return [(group.heads, part) for group, part in zip(attention.mechanism.groups, attention.groups)]  # type: ignore[misc]


def _stored(name: str) -> str:
    return name + _MAPS[name][0] if name in _MAPS else name


def _bounded(name: str, free: Tensor) -> Tensor:
    kind, low = _MAPS.get(name, ("", 0.0))
    if kind == "_logit":
        return torch.sigmoid(free) + low
    return free.exp() if kind == "_log" else free


def _free(name: str, value: Tensor) -> Tensor:
    """The value without bounds that stands for a parameter."""
    kind, low = _MAPS.get(name, ("", 0.0))
    inside = (value > low) & (value < low + 1.0) if kind == "_logit" else value > 0.0
    if kind and not bool(inside.all()):
        expected = f"inside ({low:g}, {low + 1:g})" if kind == "_logit" else "above 0"
        remedy = f"must be {expected} where it is learned; configure another value or leave it out of `learned`"
        raise ConfigurationError(
            f"configuration field `{name}` is {value.flatten()[0].item():g}; {remedy}",
            code="out-of-range",
            field=name,
            remedy=remedy,
        )
    if kind == "_logit":
        return torch.logit(value.double() - low).float()
    return value.log() if kind == "_log" else value
