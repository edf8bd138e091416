"""Parameters, gradients and optimizer state cut over the ranks: fully sharded data parallelism.

To read the code, an afternoon's worth, in this order:

1. What is cut and how: ``shard_layout`` (which rows are whose), ``sharded_parameter`` (one parameter's two forms),
   ``unit_memory`` (where rows and wholes lie), ``unit`` (a module's parameters, gathered, freed and reduced together).
2. What travels: ``exchange`` (pieces of tensors over torch.distributed), ``transports`` (which way is taken),
   ``near_ranks`` (a smaller world between forward and backward); on one host ``shared_counters``, ``shared_gradients``.
3. What happens when: ``schedule`` (pure: who is gathered and freed at whose turn), ``run`` (the hooks that do it),
   ``same_order`` (whether all ranks come to the same unit), ``shard_guard`` (rows that are taken for the whole).
4. What users call: ``fully_shard``; ``wrapper`` for scripts that wrap, with ``wrap_policies``, ``summon`` and
   ``state_settings``; ``policies`` (data types, offload); ``refusals`` (what only torch's has).
5. What torch's own functions must know: ``before_step`` (the one place where they are told), ``clip``, ``overflow``.
6. State: ``state``, ``optimizer_state`` (whole, or each rank's part), ``state_forms`` (what ``state_dict()`` shows),
   ``materialize`` (models from the meta device), ``sharded_optimizer`` (ZeRO stage 1, on its own).
7. Worlds that change: ``held_rows`` and ``generations`` (what a rank has, and the newest step that is whole),
   ``replicas`` (copies in the neighbour's memory), ``rebuild``.

A step, in short: a unit's forward hook calls ``Run.before_forward``, which makes the unit whole (``Unit.unshard``) and
begins to gather the next; ``after_forward`` frees it. In backward a hook on the output makes it whole again, hooks on
the whole parameters count gradients, and when all are there ``Run._launch`` frees the unit and begins its reduction,
whose sums become the gradients of the rows. Between iterations ``Run.settle`` sees to it that nothing is whole.
"""

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
