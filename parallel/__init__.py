"""The training library: data parallelism, sharding, data and checkpoints.

Names are imported when they are first used, so that a script pays only for what it takes.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collective_error import CollectiveError as CollectiveError
    from .collective_error import CollectiveTimeout as CollectiveTimeout
    from .collective_error import PeerLost as PeerLost
    from .data.sampler import ElasticDistributedSampler as ElasticDistributedSampler
    from .data.streaming import ElasticStream as ElasticStream
    from .ddp.comm_hooks import allreduce_hook as allreduce_hook
    from .ddp.comm_hooks import bf16_compress_hook as bf16_compress_hook
    from .ddp.comm_hooks import fp16_compress_hook as fp16_compress_hook
    from .ddp.distributed_data_parallel import DistributedDataParallel as DistributedDataParallel
    from .ddp.grad_bucket import GradBucket as GradBucket
    from .ddp.mixed_precision import MixedPrecision as MixedPrecision
    from .ddp.naive import NaiveDistributedDataParallel as NaiveDistributedDataParallel
    from .ddp.post_local_sgd import PeriodicAverage as PeriodicAverage
    from .ddp.post_local_sgd import PostLocalSGDState as PostLocalSGDState
    from .ddp.post_local_sgd import post_local_sgd_hook as post_local_sgd_hook
    from .ddp.power_sgd import PowerSGDState as PowerSGDState
    from .ddp.power_sgd import power_sgd_hook as power_sgd_hook
    from .ddp.sync_batch_norm import SyncBatchNorm as SyncBatchNorm
    from .dp.data_parallel import DataParallel as DataParallel
    from .fsdp import FullyShardedDataParallel as FullyShardedDataParallel
    from .fsdp import fully_shard as fully_shard
    from .scripts.routed_module import wrapper_of as wrapper_of

_HOMES = {
    "CollectiveError": ".collective_error",
    "CollectiveTimeout": ".collective_error",
    "DataParallel": ".dp.data_parallel",
    "DistributedDataParallel": ".ddp.distributed_data_parallel",
    "ElasticDistributedSampler": ".data.sampler",
    "ElasticStream": ".data.streaming",
    "FullyShardedDataParallel": ".fsdp",
    "GradBucket": ".ddp.grad_bucket",
    "MixedPrecision": ".ddp.mixed_precision",
    "NaiveDistributedDataParallel": ".ddp.naive",
    "PeriodicAverage": ".ddp.post_local_sgd",
    "PeerLost": ".collective_error",
    "PostLocalSGDState": ".ddp.post_local_sgd",
    "PowerSGDState": ".ddp.power_sgd",
    "SyncBatchNorm": ".ddp.sync_batch_norm",
    "allreduce_hook": ".ddp.comm_hooks",
    "bf16_compress_hook": ".ddp.comm_hooks",
    "fp16_compress_hook": ".ddp.comm_hooks",
    "fully_shard": ".fsdp",
    "post_local_sgd_hook": ".ddp.post_local_sgd",
    "power_sgd_hook": ".ddp.power_sgd",
    "wrapper_of": ".scripts.routed_module",
}

__all__ = sorted(_HOMES)  # noqa: PLE0605  # the table above is the list


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name], __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
