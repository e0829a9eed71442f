"""Checkpoints: written by any plan, read by any other; safetensors and JSON only, never a pickle.

```python
identity = RunIdentity(job="gpt", optimizer="AdamW", seed=0, batch_size=512, plan=str(plan), tied={"lm_head.weight": "wte.weight"})
held = [LocalShard(spec, tensor), LocalShard(spec, shard, flat=(1000, 2000)), ...]     # what this rank has of the user's tensors

with Checkpointer(run / "checkpoints", group, identity=identity, keep_last=2) as checkpoints:   # a Gloo group of its own, or None
    loaded = checkpoints.load(held, optimizers=[optimizer])     # None: nothing to resume from
    if loaded is not None:
        step, extra = loaded.step, loaded.extra                 # loaded.differences: sentences to show
    for step in ...:
        checkpoints.save(step, held, optimizers=[optimizer], extra={"scheduler": scheduler.state_dict(), ...})   # blocks for the copy only
        for outcome in checkpoints.finished():                  # how earlier saves ended; outcome.event(at_seconds) is the Event
            ...
    checkpoints.save(step, held, optimizers=[optimizer], extra={...}, final=True)   # in place when it returns, or JobFailedError
```

`export` turns a checkpoint into a file for plain PyTorch or transformers: in one process, with no more memory than a block of a tensor.

What holds after a failure. Whenever and wherever a process dies, the newest checkpoint that was whole is found and can be read. A save that
fails on one rank fails on all, leaves nothing behind and does not end the run, unless it was the final one.
"""
