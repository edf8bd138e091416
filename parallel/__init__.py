"""The training library: data-parallel modules over torch.distributed."""
