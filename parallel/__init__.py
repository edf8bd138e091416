"""The training library: data parallelism, sharding, data and checkpoints.

Names are imported when they are first used, so that a script pays only for what it takes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .comm_hooks import allreduce_hook as allreduce_hook
    from .comm_hooks import bf16_compress_hook as bf16_compress_hook
    from .comm_hooks import fp16_compress_hook as fp16_compress_hook
    from .data_parallel import DataParallel as DataParallel
    from .distributed_data_parallel import DistributedDataParallel as DistributedDataParallel
    from .grad_bucket import GradBucket as GradBucket
    from .mixed_precision import MixedPrecision as MixedPrecision
    from .naive import NaiveDistributedDataParallel as NaiveDistributedDataParallel
    from .post_local_sgd import PeriodicAverage as PeriodicAverage
    from .post_local_sgd import PostLocalSGDState as PostLocalSGDState
    from .post_local_sgd import post_local_sgd_hook as post_local_sgd_hook
    from .power_sgd import PowerSGDState as PowerSGDState
    from .power_sgd import power_sgd_hook as power_sgd_hook
    from .routed_module import wrapper_of as wrapper_of
    from .sampler import ElasticDistributedSampler as ElasticDistributedSampler
    from .streaming import ElasticStream as ElasticStream
    from .sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from .transport import CollectiveFailed as CollectiveFailed

_HOMES = {
    "CollectiveFailed": ".transport",
    "DataParallel": ".data_parallel",
    "DistributedDataParallel": ".distributed_data_parallel",
    "ElasticDistributedSampler": ".sampler",
    "ElasticStream": ".streaming",
    "GradBucket": ".grad_bucket",
    "MixedPrecision": ".mixed_precision",
    "PeriodicAverage": ".post_local_sgd",
    "PostLocalSGDState": ".post_local_sgd",
    "PowerSGDState": ".power_sgd",
    "SyncBatchNorm": ".sync_batch_norm",
    "allreduce_hook": ".comm_hooks",
    "bf16_compress_hook": ".comm_hooks",
    "fp16_compress_hook": ".comm_hooks",
    "post_local_sgd_hook": ".post_local_sgd",
    "power_sgd_hook": ".power_sgd",
    "NaiveDistributedDataParallel": ".naive",
    "wrapper_of": ".routed_module",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605  # the table above is the list


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
