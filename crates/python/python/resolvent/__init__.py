"""Attention mechanisms on the CPU: fused, differentiable, exactly masked, with O(N) extra memory.

`attend` and `attend_backward` take NumPy arrays and everything that speaks DLPack; `resolvent.torch` has operators and
modules for PyTorch, `resolvent.transformers` attention implementations for Hugging Face models. `convert` puts a mechanism into a
whole model, or one into every head, as a `Fit` says; `distill` trains such a model towards the original; `analyze` looks at what attention is
given. These three import PyTorch when they are first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import errors, values
from ._resolvent import Clusters, __version__
from .arrays import Gradients, State, attend, attend_backward, attend_varlen, attend_varlen_backward, clusters
from .errors import (
    ConfigurationError,
    DeviceError,
    DTypeError,
    Error,
    NumericalError,
    OutOfMemoryError,
    TensorError,
    UnsupportedError,
)
from .fits import Fit, HeadMechanisms, load_fit
from .mechanism import Mechanism, MechanismLike, mechanisms
from .planning import Plan, plan
from .threads import get_num_threads, release_memory, set_num_threads
from .values import (
    Clustered,
    Constant,
    CosineExp,
    Dense,
    DotAbs,
    DotExp,
    DotGelu,
    DotRelu,
    DotSigmoid,
    DotSquaredRelu,
    Factors,
    Features,
    Frobenius,
    Gaussian,
    Hops,
    Laplacian,
    Levy,
    Nystrom,
    OneHop,
    Projected,
    Resolvent,
    Row,
    Student,
    Symmetric,
    Unnormalised,
    Whitened,
)

if TYPE_CHECKING:
    from .models import analyze, convert, distill

__all__ = [
    "Clustered",
    "Clusters",
    "ConfigurationError",
    "Constant",
    "CosineExp",
    "DTypeError",
    "Dense",
    "DeviceError",
    "DotAbs",
    "DotExp",
    "DotGelu",
    "DotRelu",
    "DotSigmoid",
    "DotSquaredRelu",
    "Error",
    "Factors",
    "Features",
    "Fit",
    "Frobenius",
    "Gaussian",
    "Gradients",
    "HeadMechanisms",
    "Hops",
    "Laplacian",
    "Levy",
    "Mechanism",
    "MechanismLike",
    "NumericalError",
    "OutOfMemoryError",
    "Nystrom",
    "OneHop",
    "Plan",
    "Projected",
    "Resolvent",
    "Row",
    "State",
    "Student",
    "Symmetric",
    "TensorError",
    "Unnormalised",
    "UnsupportedError",
    "Whitened",
    "__version__",
    "analyze",
    "attend",
    "attend_backward",
    "attend_varlen",
    "attend_varlen_backward",
    "clusters",
    "convert",
    "distill",
    "errors",
    "get_num_threads",
    "load_fit",
    "mechanisms",
    "plan",
    "release_memory",
    "set_num_threads",
    "values",
]


def __getattr__(name: str) -> Any:
    if name in ("analyze", "convert", "distill"):
        from . import models

        return getattr(models, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
