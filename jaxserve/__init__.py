"""An OpenAI-compatible inference server in pure JAX for small fleets of agents on one chip."""

import time

__version__ = "0.1.0"

STARTED_S = time.perf_counter()
"""When this process began to import the package, by `time.perf_counter`."""
