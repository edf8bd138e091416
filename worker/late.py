"""Variables that a script sets itself, too late to be seen by a torch that the warm start had already imported."""

from __future__ import annotations

TYPE_CHECKING = False  # as in typing, without the milliseconds that importing it costs
if TYPE_CHECKING:
    from collections.abc import Mapping


# Read once, while torch and the libraries below it are loaded. Read later, and so no matter: NCCL_*, TORCH_NCCL_*,
# CUDA_VISIBLE_DEVICES, PYTORCH_CUDA_ALLOC_CONF, TORCHINDUCTOR_CACHE_DIR (which torch itself sets), TORCHELASTIC_*.
_NAMES = frozenset(
    {
        "MKL_NUM_THREADS",
        "NUMEXPR_NUM_THREADS",
        "OPENBLAS_NUM_THREADS",
        "PYTORCH_JIT",
        "TORCH_CPP_LOG_LEVEL",
        "TORCH_DISTRIBUTED_DEBUG",
        "TORCH_LOGS",
        "TORCH_SHOW_CPP_STACKTRACES",
        "TORCH_TRACE",
    }
)
_PREFIXES = ("OMP_", "GOMP_", "KMP_", "TORCHDYNAMO_", "TORCHINDUCTOR_")
_SET_BY_TORCH = frozenset({"TORCHINDUCTOR_CACHE_DIR", "KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"})


def late_variables(before: Mapping[str, str], after: Mapping[str, str]) -> list[str]:
    """The names among those that torch reads at import which the script has set anew or changed."""
    return sorted(name for name in after if _matters(name) and after[name] != before.get(name))


def _matters(name: str) -> bool:
    if name in _NAMES:
        return True
    return name.startswith(_PREFIXES) and name.isidentifier() and name.isascii() and name not in _SET_BY_TORCH
