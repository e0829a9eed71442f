"""Swarm on real machines: the protocol of `atoll.control` over the fabric, with tensors.

`compute.py` is the arithmetic of a worker, `transport.py` its clock and its messages, `files.py` the journal and the checkpoints,
`micro_batches.py` the data. None of them decides anything: the protocol does.
"""
