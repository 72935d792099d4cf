"""Attention mechanisms on the CPU: fused, differentiable, exactly masked, with O(N) extra memory.

`attend` and `attend_backward` take NumPy arrays and everything that speaks DLPack; `resolvent.torch` has operators and
modules for PyTorch, `resolvent.transformers` attention implementations for Hugging Face models.
"""

from __future__ import annotations

from . import errors, values
from ._resolvent import Clusters, __version__
from .arrays import Gradients, State, attend, attend_backward, clusters
from .errors import (
    ConfigurationError,
    DeviceError,
    DTypeError,
    Error,
    NumericalError,
    TensorError,
    UnsupportedError,
)
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
    Resolvent,
    Row,
    Student,
    Symmetric,
    Unnormalised,
    Whitened,
)

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
    "Frobenius",
    "Gaussian",
    "Gradients",
    "Hops",
    "Laplacian",
    "Levy",
    "Mechanism",
    "MechanismLike",
    "NumericalError",
    "Nystrom",
    "OneHop",
    "Plan",
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
    "attend",
    "attend_backward",
    "clusters",
    "errors",
    "get_num_threads",
    "mechanisms",
    "plan",
    "release_memory",
    "set_num_threads",
    "values",
]
