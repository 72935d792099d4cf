"""Generation with a cache of transformers: what a mechanism has made of the past is kept beside it, and goes on with it.

Causal clusters of segments that are complete never change, so that the keys and values of a cache need to be clustered once. What is
kept belongs to one layer of one cache, and to its keys: a hook before the layer of attention looks whether the cache still holds the
tensor that was last attended to, unwritten since. Whatever else has happened to it (sequences chosen or reordered, tokens taken back,
another cache) makes other tensors, and the past is clustered anew.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Callable, Sequence

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin, DynamicLayer, StaticLayer

from . import _resolvent
from .errors import UnsupportedError
from .mechanism import Mechanism
from .threads import told

__all__ = ["Kept", "beside", "decodes"]

#: Tokens that are taken one by one; of more the whole operator makes the rows faster.
_FEW = 16
#: Classes of layers whose `update` puts new tokens behind those before, and leaves these as they are.
_KNOWN = (DynamicLayer.update, StaticLayer.update)


class _Before:
    """A call of a layer of attention, before the cache takes the new tokens. It keeps nothing alive."""

    def __init__(self, module: torch.nn.Module, layer: CacheLayerMixin) -> None:
        self.module, self.layer = weakref.ref(module), weakref.ref(layer)
        known = _KEPT.get(layer)
        self.known = weakref.ref(known) if known is not None and known.is_of(layer) else None
        """What was kept of just the keys and values that the cache holds."""
        self.kept: weakref.ref[Kept] | None = None
        """What is kept, once it was asked for: heads with mechanisms of their own ask several times."""


class _Calling(threading.local):
    before: _Before | None = None


_CALLING = _Calling()


class _Decoder:
    """A mechanism's past, and the masked keys among it."""

    def __init__(self, past: _resolvent.Past) -> None:
        self.past = past
        self.keep: Tensor | None = None


class Kept:
    """What is kept beside one layer of a cache, as long as that lives."""

    def __init__(self) -> None:
        self._seen: list[tuple[weakref.ref[Tensor], int | None]] = []
        self.tokens = 0
        self._decoders: dict[Any, _Decoder] = {}

    def is_of(self, layer: CacheLayerMixin) -> bool:
        """Whether the cache holds what was attended to last, unwritten since."""
        held = (layer.keys, layer.values)
        same = [x is not None and seen() is x and version == _version(x) for x, (seen, version) in zip(held, self._seen)]
        return len(same) == len(held) and all(same)

    def saw(self, layer: CacheLayerMixin, tokens: int) -> None:
        """Remembers what the cache holds now."""
        held = (layer.keys, layer.values)
        self._seen, self.tokens = [(weakref.ref(x), _version(x)) for x in held if x is not None], tokens

    def rows(
        self,
        group: int,
        mechanism: Mechanism,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        parameters: dict[str, Tensor] | None,
        select: Callable[[Tensor], Tensor],
    ) -> Tensor:
        """The rows of the last tokens, whose queries are q, of all keys and values: ``[batch, heads, queries, channels]``. `group` numbers
        heads with mechanisms of their own, to which those of k and v belong that `select` returns."""
        keep = None if keep is None or bool(keep.all()) else keep
        before = k.shape[2] - q.shape[2]
        name = (group, mechanism, q.shape[:2], q.shape[3], v.shape[3])
        # Not kept if anything goes wrong.
        decoder = self._decoders.pop(name, None)
        if decoder is None or len(decoder.past) > before or not _same_keys(decoder, keep):
            sizes = {"batch": q.shape[0], "heads": q.shape[1], "kv_heads": select(k[:, :, :1]).shape[1]}
            past = _resolvent.Past(mechanism._core, **sizes, head_dim=q.shape[3], value_dim=v.shape[3], capacity=k.shape[2])
            decoder = _Decoder(past)
        done, given = len(decoder.past), list((parameters or {}).items())
        out = torch.empty((*q.shape[:3], v.shape[3]))
        for queries, rows, start, end in ((None, None, done, before), (q, out, before, k.shape[2])):
            if start < end:
                keys, values = select(k[:, :, start:end]), select(v[:, :, start:end])
                _take(decoder.past, queries, keys, values, None if keep is None else keep[:, start:end], given, rows)
        decoder.keep = keep
        self._decoders[name] = decoder
        return out.to(q.dtype)


#: By the layer of the cache.
_KEPT: weakref.WeakKeyDictionary[CacheLayerMixin, Kept] = weakref.WeakKeyDictionary()


@functools.lru_cache(maxsize=256)
def decodes(mechanism: Mechanism) -> bool:
    """Whether clusters of the past are kept for this mechanism."""
    if not (mechanism.clustered and mechanism._core.row_local) or mechanism.id == "ssa":
        return False
    try:
        _resolvent.Past(mechanism._core, batch=1, heads=1, kv_heads=1, head_dim=1, value_dim=1)
    except UnsupportedError:
        return False
    return True


def beside(module: torch.nn.Module, key: Tensor, tokens: int, new: int, tensors: Sequence[Tensor]) -> Kept | None:
    """What is kept beside the cache that has just returned `key`, of which `tokens` are taken, `new` of them by this call; nothing
    where it has to be computed as a whole."""
    if torch.compiler.is_compiling() or torch.is_autocast_enabled("cpu"):
        return None
    if not any(hook is _before_forward for hook in module._forward_pre_hooks.values()):
        module.register_forward_pre_hook(_before_forward, with_kwargs=True)
        return None
    before = _CALLING.before
    layer = None if before is None or before.module() is not module else before.layer()
    if before is None or layer is None or layer.keys is not key:
        return None
    if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
        return None
    kept = None if before.kept is None else before.kept()
    if kept is None:
        kept = None if before.known is None else before.known()
        if kept is None or kept.tokens != tokens - new:
            kept = _KEPT[layer] = Kept()
        kept.saw(layer, tokens)
        before.kept = weakref.ref(kept)
    return kept if new <= _FEW and new < tokens else None


def _before_forward(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Remembers what the cache holds before a layer of attention is called."""
    _CALLING.before = None
    if torch.compiler.is_compiling():
        return
    cache = next((x for x in (*kwargs.values(), *args) if isinstance(x, Cache)), None)
    layers = getattr(getattr(cache, "self_attention_cache", cache), "layers", ())
    number = getattr(module, "layer_idx", None)
    if not isinstance(number, int) or number >= len(layers) or type(layers[number]).update not in _KNOWN:
        return
    layer = layers[number]
    # Nobody counts what is written to a static cache in inference mode.
    if layer.keys is None or not (type(layer).update is StaticLayer.update and layer.keys.is_inference()):
        _CALLING.before = _Before(module, layer)


def _version(x: Tensor) -> int | None:
    """How often the tensor was written to, where that is counted."""
    return None if x.is_inference() else x._version


def _same_keys(decoder: _Decoder, keep: Tensor | None) -> bool:
    """Whether the tokens that were taken are masked as they were."""
    done, before = len(decoder.past), decoder.keep
    if before is None and keep is None:
        return True
    if keep is None or before is None:
        some = keep if before is None else before
        assert some is not None
        return bool(some[:, :done].all())
    return torch.equal(before[:, :done], keep[:, :done])


def _take(
    past: _resolvent.Past,
    q: Tensor | None,
    k: Tensor,
    v: Tensor,
    keep: Tensor | None,
    parameters: list[tuple[str, Tensor]],
    out: Tensor | None,
) -> None:
    def dense(x: Tensor) -> Tensor:
        return x.detach().float().resolve_neg().contiguous()

    given = [(name, dense(values)) for name, values in parameters]
    options: dict[str, Any] = {"threads": told() or torch.get_num_threads(), "parameters": given}
    mask = None if keep is None else keep.contiguous()
    past.take(None if q is None else dense(q), dense(k), dense(v), out, key_mask=mask, **options)
