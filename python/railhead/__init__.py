"""Railhead for Python: ranks that compute together, and the store in which they meet, over shared memory, TCP or RDMA.

`import railhead.torch` has torch.distributed know the backend "railhead". Everything here calls the C interface, include/railhead.h; the
interpreter's lock is released while the library works.
"""

from railhead._library import Error, NetworkError, TimedOut, UsageError, library_version
from railhead.mesh import Mesh, Unbound
from railhead.store import Store

__version__ = "0.1.0"
__all__ = ["Error", "Mesh", "NetworkError", "Store", "TimedOut", "Unbound", "UsageError", "library_version"]
