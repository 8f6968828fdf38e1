"""An OpenAI-compatible inference server in pure JAX for small fleets of agents on one chip."""

__version__ = "0.1.0"
