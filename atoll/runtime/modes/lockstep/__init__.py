"""Lockstep: any plan on `torch.distributed`, every step equal to one process's."""
