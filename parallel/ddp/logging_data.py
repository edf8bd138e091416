"""What a wrapper tells of itself, under the names of torch's logging data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from .bucket_layout import Layout
    from .distributed_data_parallel import DistributedDataParallel
    from .reducer import Reducer


def logging_data(ddp: DistributedDataParallel) -> dict[str, Any]:
    """What ``ddp`` is and where its time went; sizes in bytes, times in nanoseconds for one step."""
    reducer = ddp.reducer
    communication = reducer.communication
    sizes = _sizes(reducer, reducer.layout)
    hook = communication.comm_hook
    return {
        "module_name": type(ddp.module).__name__,
        "world_size": communication.world_size,
        "rank": communication.rank,
        "backend_name": dist.get_backend(communication.group),
        "transport": communication.transport_name,
        "iteration": reducer.times.steps,
        "num_parameter_tensors": len(reducer.members),
        "total_parameter_size_bytes": sum(sizes),
        "bucket_cap_bytes": reducer.options.caps[-1],
        "initial_bucket_sizes": ", ".join(map(str, _sizes(reducer, reducer.initial_layout))),
        "rebuilt_bucket_sizes": ", ".join(map(str, sizes)) if reducer.has_rebuilt else "",
        "has_rebuilt_buckets": int(reducer.has_rebuilt),
        "broadcast_buffers": int(ddp.forward_sync_buffers),
        "find_unused_parameters": int(ddp.find_unused_parameters),
        "gradient_as_bucket_view": int(ddp.gradient_as_bucket_view),
        "static_graph": int(ddp.static_graph),
        "can_set_static_graph": int(not reducer.ever_unused),
        "comm_hook": "" if hook is None else getattr(hook[1], "__name__", "hook"),
        **reducer.times.averages(),
    }


def _sizes(reducer: Reducer, layout: Layout) -> list[int]:
    """Of each bucket, what its parameters take."""
    return [sum(reducer.members[number].parameter.nbytes for number in bucket) for bucket in layout]
