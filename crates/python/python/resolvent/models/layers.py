"""Layers of attention within a model: which there are, what they are made of, and which of them are meant."""

from __future__ import annotations

import fnmatch
import inspect
from typing import Any, Callable, Iterable, Literal, NamedTuple, Union

from torch import nn

from ..crossing import crosses, writes
from ..errors import ConfigurationError, UnsupportedError
from ..torch import Attention, HeadAttention, MultiheadAttention

__all__ = ["CONVERTED", "Layer", "Layers", "find", "select"]

Layers = Union[int, slice, str, Callable[[str, nn.Module], bool], Iterable[Any], None]
"""Which layers: by their number, a slice of these, a name, the name of what holds them, a pattern (``*.self``), a function of name and
module, several of these, or ``None`` for all."""

#: What a converted layer of transformers holds its mechanism by.
CONVERTED = "resolvent"
#: Names that models give to the projection of keys.
_KEYS = ("key", "k_proj", "k_lin", "k", "wk", "to_k", "key_proj", "linear_k", "k_linear")


class Layer(NamedTuple):
    """A layer of attention."""

    name: str
    module: nn.Module
    kind: Literal["transformers", "torch", "converted"]
    heads: int
    head_dim: int
    causal: bool
    """Whether its queries see no later key; layers of ``torch.nn`` are told so by every call."""
    crossed: bool
    """Whether the keys are of other tokens."""
    dropout: float

    @property
    def writes(self) -> bool:
        """Whether the model is one of texts, or of ``torch.nn``: its cross-attention may be of tokens that come one after the other."""
        return writes(self.module) or self.kind == "torch"

    def keys(self) -> list[str]:
        """Names of the parameters that make keys, where they make nothing else."""
        return [name for name, _ in self.module.named_parameters() if name.split(".")[0] in _KEYS]


def find(model: nn.Module) -> list[Layer]:
    """All layers of attention that this package knows, in the order of ``named_modules``."""
    owned: set[int] = set()
    found = []
    for name, module in model.named_modules():
        if id(module) in owned:
            continue
        layer = _of(model, name, module)
        if layer is not None:
            found.append(layer)
            owned.update(id(inner) for inner in module.modules())
    return found


def _of(model: nn.Module, name: str, module: nn.Module) -> Layer | None:
    if isinstance(module, (nn.MultiheadAttention, MultiheadAttention)):
        holder = model.get_submodule(name.rpartition(".")[0])
        crossed = isinstance(holder, nn.TransformerDecoderLayer) and name.endswith("multihead_attn")
        kind: Any = "torch" if isinstance(module, nn.MultiheadAttention) else "converted"
        return Layer(name, module, kind, module.num_heads, module.head_dim, False, crossed, module.dropout)
    if isinstance(module, (Attention, HeadAttention)):
        return Layer(name, module, "converted", module.heads, module.head_dim, module.causal, False, module.dropout)
    if not _asks_for_an_implementation(module):
        return None
    config: Any = module.config
    crossed = crosses(module)
    heads = _number(module, config, "num_heads", "num_attention_heads", "n_heads", "n_head")
    head_dim = _number(module, config, "head_dim", "attention_head_size", "head_size")
    if heads is None:
        why = "its number of heads is under no name that is known"
        raise UnsupportedError(f"layer `{name}` is not supported: {why}", code="unsupported", field=name, remedy=why)
    kind = "transformers" if getattr(module, CONVERTED, None) is None else "converted"
    causal = bool(getattr(module, "is_causal", False)) and not crossed
    return Layer(name, module, kind, heads, head_dim or config.hidden_size // heads, causal, crossed, _dropout(module, config))


def _asks_for_an_implementation(module: nn.Module) -> bool:
    """Whether the module is one of transformers' that leaves attention to the implementation that its configuration names."""
    if not hasattr(getattr(module, "config", None), "_attn_implementation"):
        return False
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "ALL_ATTENTION_FUNCTIONS" in code.co_names


def _number(module: nn.Module, config: Any, *names: str) -> int | None:
    for holder in (module, config):
        for name in names:
            if isinstance(number := getattr(holder, name, None), int):
                return number
    return None


def _dropout(module: nn.Module, config: Any) -> float:
    """The probability by which the layer leaves out weights in training."""
    names = ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop", "attn_dropout", "dropout_prob")
    for holder in (config, module):
        for name in names:
            value = getattr(holder, name, None)
            value = value.p if isinstance(value, nn.Dropout) else value
            if isinstance(value, (int, float)):
                return float(value)
    return 0.0


def select(found: list[Layer], layers: Layers) -> list[Layer]:
    """The layers that are meant, in their order."""
    if not found:
        remedy = "pass one of transformers' models that ask an attention interface, or one that holds torch.nn.MultiheadAttention"
        raise UnsupportedError(f"the model has no attention that is known; {remedy}", code="unsupported", field="model", remedy=remedy)
    if layers is None:
        return found
    chosen = _chosen(found, layers)
    if not chosen:
        raise _unknown(found, layers)
    return [layer for n, layer in enumerate(found) if n in chosen]


def _chosen(found: list[Layer], layers: Any) -> set[int]:
    if isinstance(layers, int):
        if not -len(found) <= layers < len(found):
            raise _unknown(found, layers)
        return {layers % len(found)}
    if isinstance(layers, slice):
        return set(range(len(found))[layers])
    if isinstance(layers, str):
        chosen = {n for n, layer in enumerate(found) if _is_called(layer.name, layers)}
        if not chosen:
            raise _unknown(found, layers)
        return chosen
    if callable(layers):
        return {n for n, layer in enumerate(found) if layers(layer.name, layer.module)}
    try:
        return set().union(*(_chosen(found, one) for one in layers))
    except TypeError:
        raise _unknown(found, layers) from None


def _is_called(name: str, asked: str) -> bool:
    return name == asked or name.startswith(asked + ".") or fnmatch.fnmatchcase(name, asked)


def _unknown(found: list[Layer], layers: Any) -> ConfigurationError:
    names = ", ".join(layer.name for layer in found[:12]) + (", ..." if len(found) > 12 else "")
    remedy = f"there are {len(found)}: {names}"
    return ConfigurationError(f"argument `layers` is {layers!r}, which is no layer; {remedy}", code="argument", field="layers", remedy=remedy)
