"""What all tests share."""

import os
import sys

if sys.platform == "linux":
    # Processes of a test find each other on this machine, whatever its name resolves to.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
