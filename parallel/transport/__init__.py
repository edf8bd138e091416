"""How flat buffers are reduced and gathered: torch.distributed, or shared memory of one host."""
