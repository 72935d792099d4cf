"""What all tests share."""

import os
import sys
import tempfile

import pytest

if sys.platform == "linux":
    # Processes of a test find each other on this machine, whatever its name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

# What compilers have kept of an earlier build, under the same version, is not what is tested.
_compiled = tempfile.TemporaryDirectory(prefix="resolvent-compiled-")
os.environ["TORCHINDUCTOR_CACHE_DIR"] = _compiled.name


@pytest.fixture(scope="session", autouse=True)
def _compiled_is_removed():
    yield
    _compiled.cleanup()
