"""Attention layers of Hugging Face transformers, each on a mechanism of its own.

A model has one attention implementation, by its configuration. The one installed here asks every layer: one that holds a mechanism
computes it, any other gets the implementation that was there before, with the mask that this one would have been given.
"""

from __future__ import annotations

import sys
import weakref
from contextvars import ContextVar
from typing import Any, Callable, Iterable, Optional, Union

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ..errors import UnsupportedError
from ..torch import Attention, HeadAttention
from ..patterns import pattern_of, token_mask
from ..transformers import _attention, _attention_by_group
from .given import Given
from .layers import CONVERTED

__all__ = ["RECORDER", "LayerAttention", "LayerHeadAttention", "configurations", "hold", "install", "restore"]

_PREFIX = "resolvent:layers/"


class LayerAttention(Attention):
    """The mechanism of one layer, and what it learns."""

    override: Optional[float] = None
    """The dropout of weights in place of the layer's own."""


class LayerHeadAttention(HeadAttention):
    """The mechanisms of one layer's heads, and what they learn."""

    override: Optional[float] = None
    """The dropout of weights in place of the layer's own."""


#: Converted layers, and the configurations that say so.
_HELD: weakref.WeakKeyDictionary[nn.Module, list[PreTrainedConfig]] = weakref.WeakKeyDictionary()
#: Called with every attention call while it is set.
RECORDER: ContextVar[Optional[Callable[[Given], None]]] = ContextVar("resolvent_recorder", default=None)


def configurations(model: nn.Module, modules: Iterable[nn.Module]) -> list[PreTrainedConfig]:
    """The configurations that say how these layers attend, and which masks they are given."""
    found: dict[int, PreTrainedConfig] = {}
    for module in modules:
        config: Any = module.config
        found[id(config)] = config
    implementations = {config._attn_implementation for config in found.values()}
    # Masks are made by what holds the layers, often with the configuration that the layers have, but not always.
    for holder in model.modules():
        config = getattr(holder, "config", None)
        if isinstance(config, PreTrainedConfig) and config._attn_implementation in implementations:
            found[id(config)] = config
    return list(found.values())


def install(config: PreTrainedConfig) -> None:
    """Asks every layer of this configuration from now on."""
    original = config._attn_implementation
    if original is None:
        original = "eager"
    if original.startswith(_PREFIX):
        return
    config._attn_implementation_internal = _registered(original)


def _registered(original: str) -> str:
    """The implementation that asks every layer, and is `original` for those without a mechanism."""
    name = _PREFIX + original
    AttentionInterface.register(name, _Attending(original))
    AttentionMaskInterface.register(name, _Masking(original))
    return name


def hold(module: nn.Module, configs: list[PreTrainedConfig]) -> None:
    """Remembers that a converted layer needs these configurations as `install` leaves them, as long as it lives."""
    _HELD[module] = configs


def restore(config: PreTrainedConfig) -> None:
    """Gives the implementation back that was there before, unless a converted layer, of another model too, needs this one."""
    if any(CONVERTED in module._modules and any(config is held for held in configs) for module, configs in _HELD.items()):
        return
    name = config._attn_implementation
    if name is not None and name.startswith(_PREFIX):
        config._attn_implementation_internal = name.removeprefix(_PREFIX)


class _Masking:
    """Masks for mechanisms, that know how to make the mask of the implementation before."""

    def __init__(self, original: str) -> None:
        self.original = original

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        keep = token_mask(*args, **kwargs)
        keep._resolvent_original = _Once(self.original, args, kwargs)  # type: ignore[attr-defined]
        return keep


class _Once:
    """The mask of another implementation, made where it is first asked for."""

    def __init__(self, original: str, args: Any, kwargs: Any) -> None:
        self._make: Any = (original, args, kwargs)
        self._mask: Any = None

    def __call__(self) -> Any:
        if self._make is not None:
            original, args, kwargs = self._make
            self._mask, self._make = ALL_MASK_ATTENTION_FUNCTIONS[original](*args, **kwargs), None
        return self._mask


class _Attending:
    """Attention of a layer by its own mechanism, or by the implementation before."""

    def __init__(self, original: str) -> None:
        self.original = original

    def __call__(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Optional[Tensor], **kwargs: Any
    ) -> Any:
        layer: Union[LayerAttention, LayerHeadAttention, None] = getattr(module, CONVERTED, None)
        recorder = RECORDER.get()
        if recorder is not None:
            given = _given(module, query, key, value, attention_mask, kwargs)
            recorder(given._replace(k=None) if layer is not None and layer.mechanism.tied else given)
        if layer is not None:
            if layer.override is not None:
                kwargs["dropout"] = layer.override if module.training else 0.0
            if isinstance(layer, LayerHeadAttention):
                return _attention_by_group(layer.mechanism, module, query, key, value, attention_mask, layer, **kwargs)
            return _attention(layer.mechanism, module, query, key, value, attention_mask, learned=layer, **kwargs)
        return self._function(module)(module, query, key, value, self._own_mask(attention_mask), **kwargs)

    def _function(self, module: nn.Module) -> Callable[..., Any]:
        if self.original != "eager":
            function: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS[self.original]
            return function
        for kind in type(module).__mro__:
            if found := getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None):
                return found  # type: ignore[no-any-return]
        remedy = 'set another implementation before, model.set_attn_implementation("sdpa")'
        raise UnsupportedError(
            f"layers of {type(module).__name__} that stay on eager attention are not supported; {remedy}",
            code="unsupported",
            field="attn_implementation",
            remedy=remedy,
        )

    def _own_mask(self, mask: Optional[Tensor]) -> Any:
        original = getattr(mask, "_resolvent_original", None)
        if original is not None:
            return original()
        if mask is not None and mask.dim() == 2 and not self.original.startswith(("flash", "resolvent:")):
            why = "the model has changed the mask that it was given; convert all of its layers"
            raise UnsupportedError(f"a layer left as it is: {why}", code="unsupported", field="layers", remedy=why)
        return mask


def _given(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Optional[Tensor], kwargs: dict[str, Any]
) -> Given:
    pattern, keep = pattern_of(module, query, key, mask, kwargs.get("is_causal"), kwargs.get("sliding_window"))
    names = ("softcap", "position_bias", "s_aux", "sinks", "head_mask", "cache", "block_mask")
    options = tuple(name for name in names if kwargs.get(name) is not None)
    causal = pattern.causal and query.shape[2] > 1
    return Given(module, query, key, value, keep, causal, pattern.pairs, pattern.window, kwargs.get("scaling"), options)


# A converted model that is loaded in another process brings its layers, and so this module, but no registration.
for _name in ("eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()):
    if not _name.startswith(_PREFIX):
        _registered(_name)
