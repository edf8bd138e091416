"""Parameters, gradients and optimizer state cut over the ranks: fully sharded data parallelism."""

from .clip import clip_grad_norm_ as clip_grad_norm_
from .fully_shard import FSDPModule as FSDPModule
from .fully_shard import fully_shard as fully_shard
from .fully_shard import register_fsdp_forward_method as register_fsdp_forward_method
from .materialize import materialize as materialize
from .optimizer_state import full_optimizer_state_dict as full_optimizer_state_dict
from .optimizer_state import load_full_optimizer_state_dict as load_full_optimizer_state_dict
from .optimizer_state import sharded_optimizer_state_dict as sharded_optimizer_state_dict
from .policies import CPUOffloadPolicy as CPUOffloadPolicy
from .policies import MixedPrecisionPolicy as MixedPrecisionPolicy
from .policies import OffloadPolicy as OffloadPolicy
from .rebuild import rebuild as rebuild
from .replicas import Replicas as Replicas
from .sharded_optimizer import ShardedOptimizer as ShardedOptimizer
from .state import dtensor_state_dict as dtensor_state_dict
from .state import full_state_dict as full_state_dict
from .state import load_full_state_dict as load_full_state_dict
from .state import sharded_state_dict as sharded_state_dict
from .state import stream_full_state as stream_full_state
from .wrap_policies import by_class as by_class
from .wrap_policies import by_function as by_function
from .wrap_policies import by_size as by_size
from .wrapper import FullyShardedDataParallel as FullyShardedDataParallel
from .wrapper import ShardingStrategy as ShardingStrategy
