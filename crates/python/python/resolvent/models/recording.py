"""What the attention of a model is given, call by call."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigurationError
from ..torch import Attention, HeadAttention
from ..torch.pairs import kept, pairs_of
from .given import Given
from .layers import Layer

__all__ = ["call", "recording", "show"]

Take = Callable[[Layer, Given], None]


@contextlib.contextmanager
def recording(model: nn.Module, layers: Sequence[Layer], take: Take) -> Iterator[None]:
    """Calls `take` with every attention call of these layers, before it is computed. The model is left as it was."""
    asked = [layer for layer in layers if hasattr(layer.module, "config")]
    fast = torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as stack:
        # Encoder layers of `torch.nn` have a path of their own, which calls no module.
        torch.backends.mha.set_fastpath_enabled(False)
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast)
        for layer in layers:
            if layer not in asked:
                stack.enter_context(contextlib.closing(_Hook(layer, take)))
        if asked:
            stack.enter_context(_asking(model, asked, take))
        yield


@contextlib.contextmanager
def _asking(model: nn.Module, layers: Sequence[Layer], take: Take) -> Iterator[None]:
    from .implementations import RECORDER, configurations, install, restore

    known = {id(layer.module): layer for layer in layers}
    before = [config for config in configurations(model, (layer.module for layer in layers))]
    names = [config._attn_implementation for config in before]
    for config in before:
        install(config)
    token = RECORDER.set(lambda given: take(known[id(given.module)], given) if id(given.module) in known else None)
    try:
        yield
    finally:
        RECORDER.reset(token)
        for config, name in zip(before, names):
            if config._attn_implementation != name:
                restore(config)


class _Hook:
    """Looks at the arguments of a module that attends by itself."""

    def __init__(self, layer: Layer, take: Take) -> None:
        self.layer, self.take = layer, take
        attention = layer.module if isinstance(layer.module, (nn.MultiheadAttention, Attention, HeadAttention)) else layer.module.attention
        assert isinstance(attention, nn.Module)  # of our own modules
        self._handle = attention.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        given.pop("self")
        with torch.no_grad():
            if isinstance(module, nn.MultiheadAttention):
                self.take(self.layer, _of_torch(module, **given))
            else:
                causal = bool(given["causal"]) or bool(getattr(module, "causal", False))
                self.take(self.layer, Given(module, given["q"], given["k"], given["v"], given["key_mask"], causal, given["bias"]))

    def close(self) -> None:
        self._handle.remove()


def _of_torch(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, **call: Any) -> Given:
    """The projections of ``torch.nn.MultiheadAttention``, which it does not give out."""
    padding, mask, causal = call["key_padding_mask"], call["attn_mask"], bool(call["is_causal"])
    if query.dim() == 2:
        query, key, value = query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0)
        padding = None if padding is None else padding.unsqueeze(0)
    elif not module.batch_first:
        query, key, value = query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1)
    weights: Sequence[Tensor]
    if module._qkv_same_embed_dim:
        weights = module.in_proj_weight.chunk(3)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    biases: Sequence[Tensor | None] = (None,) * 3 if module.in_proj_bias is None else module.in_proj_bias.chunk(3)

    def heads(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        projected = functional.linear(x, weight, bias)
        return projected.view(*projected.shape[:-1], module.num_heads, -1).transpose(1, 2)

    q, k, v = (heads(x, w, b) for x, w, b in zip((query, key, value), weights, biases))
    pairs = pairs_of(mask, causal, query.shape[0], query.shape[1], key.shape[1])
    keep = None if padding is None else kept(padding)[:, : pairs.keys]
    k, v = k[..., : pairs.keys, :], v[..., : pairs.keys, :]
    options = ("add_bias_kv or add_zero_attn",) if module.bias_k is not None or module.add_zero_attn else ()
    return Given(module, q, k, v, keep, pairs.causal, pairs.bias, options=options)


def call(model: nn.Module, one: Any, **options: Any) -> Any:
    """What the model makes of an input: a tensor, several arguments, or a mapping of keywords; `options` are keywords beside these."""
    if isinstance(one, Mapping):
        return model(**{**one, **options})
    return model(*one, **options) if isinstance(one, (tuple, list)) else model(one, **options)


@torch.no_grad()
def show(model: nn.Module, inputs: Any) -> int:
    """Runs the model in evaluation on inputs, or on several in a list; returns how many there were."""
    several = inputs if isinstance(inputs, list) else [inputs]
    if not several:
        remedy = "pass at least one"
        raise ConfigurationError(f"argument `inputs` is an empty list; {remedy}", code="argument", field="inputs", remedy=remedy)
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        for one in several:
            call(model, one)
    finally:
        for module in training:
            module.training = True
    return len(several)
