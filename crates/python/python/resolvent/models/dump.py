"""Queries, keys and values of a model's layers in a file that the program `resolvent` reads."""

from __future__ import annotations

import math
import os
import pathlib
from typing import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import NumericalError, UnsupportedError
from .given import Given

__all__ = ["Array", "tensors", "write"]

Array = npt.NDArray[np.generic]


def tensors(name: str, calls: Sequence[Given]) -> dict[str, Array]:
    """The tensors of one layer: ``<name>.q``, ``.k``, ``.v`` as ``[sequences, heads, tokens, channels]``, shorter sequences filled up with
    zeros, and ``.key_mask`` where some are shorter or padded. A scale of the products that is not the inverse root of the channels is
    multiplied into the queries, as the file has no place for it."""
    prefix = f"{name}." if name else ""
    queries, keys = (max(length(call) for call in calls) for length in (_queries, _keys))
    square = all(_queries(call) == _keys(call) for call in calls)
    if not square and any(_queries(call) != queries for call in calls):
        why = "queries of other tokens than the keys have no mask in a file; show inputs that are equally long"
        raise UnsupportedError(f"layer `{name}` with inputs of several lengths is not supported: {why}", code="unsupported", field=name, remedy=why)
    masks = torch.cat([_mask(call, keys) for call in calls])
    parts = {"q": [_scaled(call) for call in calls], "v": [call.v for call in calls]}
    parts["k"] = [call.k for call in calls if call.k is not None]
    found: dict[str, Array] = {}
    for part in ("q", "k", "v"):
        if parts[part]:
            tokens = queries if part == "q" else keys
            whole = torch.cat([_filled(x.detach().float(), tokens) for x in parts[part]])
            if part != "q" or square:
                # A padded token's content is not looked at, and need not be finite.
                whole = whole.masked_fill(~masks[:, None, :, None], 0.0)
            if not bool(whole.isfinite().all()):
                remedy = "the model's numbers must be finite"
                raise NumericalError(f"tensor `{prefix}{part}` is not finite; {remedy}", code="not-finite", tensor=prefix + part, remedy=remedy)
            found[prefix + part] = whole.contiguous().numpy()
    if not bool(masks.all()):
        found[f"{prefix}key_mask"] = masks.to(torch.uint8).numpy()
    return found


def _queries(call: Given) -> int:
    return call.q.shape[2]


def _keys(call: Given) -> int:
    return call.v.shape[2]


def _scaled(call: Given) -> Tensor:
    own = call.q.shape[3] ** -0.5
    return call.q if call.scale is None or math.isclose(call.scale, own, rel_tol=1e-6) else call.q * (call.scale / own)


def _mask(call: Given, keys: int) -> Tensor:
    there = torch.ones(call.v.shape[0], _keys(call), dtype=torch.bool) if call.keep is None else call.keep.to(torch.bool)
    return torch.nn.functional.pad(there, (0, keys - there.shape[1]))


def _filled(x: Tensor, tokens: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, tokens - x.shape[2]))


def write(path: pathlib.Path, arrays: Iterable[tuple[str, Array]]) -> None:
    """Writes a safetensors file, whole or not at all."""
    try:
        from safetensors.numpy import save_file
    except ImportError as error:
        remedy = "install it: pip install safetensors"
        raise UnsupportedError(f"without safetensors no file is written; {remedy}", code="unsupported", field="safetensors", remedy=remedy) from error
    part = path.with_name(path.name + ".part")
    try:
        save_file(dict(arrays), part)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
