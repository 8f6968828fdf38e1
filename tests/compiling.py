"""How tests compile on a CPU: they wait for the compiler, and most are not about speed.

A third of the compiler's usual time (a tiny model's decode: 1.7 s of a core for 5.3 s).
"""

import jax

OPTIONS: dict[str, str | bool | int] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_parallel_codegen_split_count": 1,
}
if jax.__version_info__ < (0, 11):  # newer ones know no other way to fuse
    OPTIONS["xla_cpu_use_fusion_emitters"] = False

FLAGS = " ".join(f"--{name}={str(value).lower()}" for name, value in OPTIONS.items())
"""The same as a value of XLA_FLAGS, for processes of their own."""
