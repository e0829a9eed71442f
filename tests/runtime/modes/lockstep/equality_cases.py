"""Which plans are tried on which jobs. A plan is written in the text form, without what follows from the job:

```
2 | tensor=2: (a b)=8@3:1 | c=8        micro-batches of 2; a stage of two devices that split tensors 3:1, then one of a single device
1 gpipe | …                            a schedule other than 1f1b
```

Stages are cut as evenly as the model allows; `{last}` is the number of the last layer.
"""

import msgspec

from atoll.graph.graph import Graph
from atoll.plan import Plan, parse_plan

EQUAL, UNEQUAL = "4 | a=4 b=4", "2 | a=5 b=3"
PIPE, PIPE_AGAIN = "2 | a=8 | b=8", "3 gpipe | recompute: a=8 | recompute: b=8"
VIRTUAL = "1 interleaved | a=8 | b=8 | a=8 | b=8"
SHARDED, SHARDED_AGAIN = "4 | sharded: (a b)=4,4", "4 | sharded recompute: (a b)=5,3"
LANES = "4 | (a b)=5,3"
TENSOR, TENSOR_UNEQUAL, TENSOR_AGAIN = "4 | tensor=2: (a b)=8", "4 | tensor=2: (a b)=8@3:1", "4 | tensor=2 recompute: (a b)=8"
EXPERTS, EXPERTS_SHARDED = "4 | expert: (a b)=5,3", "4 | expert sharded recompute: (a b)=4,4"

CASES: tuple[tuple[str, str], ...] = (
    # each parallelism alone, over the kinds of models
    ("gpt2", UNEQUAL),
    ("gpt2", PIPE_AGAIN),
    ("gpt2", TENSOR_UNEQUAL),
    ("gpt2-4", "1 interleaved | tensor=2: (a b)=8 | tensor=2: (c d)=8 | tensor=2: (a b)=8 | tensor=2: (c d)=8"),
    ("llama", TENSOR_AGAIN),
    ("bert", "4 | tensor=3: (a b c)=8@2:1:1"),
    ("t5", TENSOR_UNEQUAL),
    ("t5", "3 | a=8 | b=8 | recompute: c=8"),  # cuts that different numbers of values cross
    ("transformer", "2 | a=8 | recompute: b=8 | c=8 | d=8"),
    ("bart", PIPE),
    ("vit", TENSOR_UNEQUAL),
    ("qwen3-moe", EXPERTS),
    ("mixtral", EXPERTS_SHARDED),
    ("repeats", PIPE),
    ("convolutions", SHARDED_AGAIN),
    ("classifier", "4 | split={last}: (a b)=5,3"),
    ("classifier", "8 | sharded split={last}: (a b c)=4,3,1"),
    # pairs and more
    ("t5", "1 | a=6 b=2 | c=8"),  # different numbers of replicas
    ("counted", "2 | a=4 b=4 | c=6 d=2"),
    ("several", "3 | a=8 | b=8"),
    ("several", "2 | a=5 b=3"),
    ("several", "4 | tensor=2: (a b)=8@3:1"),
    ("clipped", "4 | (a b)=6,2 | c=8"),
    ("clipped", "4 | tensor=2: (a b)=5@3:1 (c d)=3"),
    ("clipped", "4 | tensor=2 sharded: (a b c d)=4,4"),
    ("llama", "4 | sharded: (a b)=3,2 (c d)=2,1"),
    ("mixtral", "4 | tensor=2 expert: (a b c d)=4,4"),
    ("mixtral", "4 | expert: (a b)=3,2 (c d)=2,1"),
    ("deepseek-v3", "2 | a=8 | expert: (b c)=4,4"),
    ("classifier", "4 | split={last}: (a b)=3,2 (c d)=2,1"),
    ("repeats", "2 | tensor=2: (a b)=8 | sharded: (c d)=4,4"),
    # the job's own ways
    ("odd", "2 | a=7 | b=3 c=4"),
    ("odd", "4 gpipe | sharded: (a b)=4,3 | c=7"),
    ("padded", UNEQUAL),
    ("padded", "4 | (a b)=4,4 | c=8"),
    ("dropout", "2 | a=8 | recompute: b=8"),
    ("dropout", "4 | sharded recompute: (a b)=4,4"),
    ("dropout", "2 | tensor=2: (a b)=8@3:1"),
    ("batch-norm", "2 | recompute: a=8 | b=8"),
    ("adapted", SHARDED),
    ("adapted", TENSOR),
    ("idle", SHARDED),
    ("peculiar", UNEQUAL),
    ("peculiar", SHARDED),
    ("evaluated", "4 | tensor=2 sharded: (a b c d)=4,4"),
    ("evaluated", "1 | a=8 | b=5 c=3"),
    ("evaluated-mixtral", EXPERTS),
    ("bf16", TENSOR),
    ("fp16", UNEQUAL),
    ("language-model", "2 | tensor=2: (a b)=8@1:3 | c=8"),
    ("mixture-of-experts", "4 | expert: (a b)=4,4 | expert sharded: (c d)=5,3"),
    ("image-classifier", PIPE),
    ("sort-digits", "2 | tensor=2: (a b)=5@3:1 (c d)=3"),
)

# What others above cover one way or another: the soak tries these too.
MORE_CASES: tuple[tuple[str, str], ...] = (
    ("llama", PIPE),
    ("padded", PIPE),
    ("clipped", SHARDED_AGAIN),
    ("counted", UNEQUAL),
    ("mixtral", "4 | expert: (a b)=4,4 | c=8"),
    ("llama", "4 | sharded recompute: (a b)=4,4 | c=8"),
    ("gpt2", "1 | a=8 | b=5 c=3"),
    ("gpt2", EQUAL),
    ("gpt2-4", "1 | a=8 | b=8 | c=8 | d=8"),
    ("llama", SHARDED),
    ("qwen3", "2 | recompute: a=8 | b=8"),
    ("bert", TENSOR_UNEQUAL),
    ("roberta", LANES),
    ("t5", "2 gpipe | a=8 | recompute: b=8"),
    ("bart", SHARDED),
    ("vit", UNEQUAL),
    ("mixtral", TENSOR_AGAIN),
    ("deepseek-v3", PIPE),
    ("transformer", PIPE_AGAIN),
    ("transformer", SHARDED),
    ("repeats", SHARDED),
    ("convolutions", UNEQUAL),
    ("counted", TENSOR_UNEQUAL),
    ("odd", "2 | a=5 b=2"),
    ("padded", TENSOR),
    ("dropout", "2 | a=4 b=4"),
    ("regions", "2 | a=8 | b=8"),
    ("regions", "2 gpipe | recompute: a=8 | recompute: b=8 | c=8 | d=8"),
    ("adapted", UNEQUAL),
    ("idle", PIPE),
    ("peculiar", PIPE),
    ("bf16", PIPE),
    ("mixture-of-experts", EXPERTS),
    ("sort-digits", PIPE),
    ("compiled", "2 | a=8 | recompute: b=8"),
    ("compiled", "2 | tensor=2: (a b)=8@3:1"),
    ("compiled-mixture", EXPERTS),
    ("gpt2", SHARDED_AGAIN),
    ("gpt2", LANES),
    ("gpt2-4", VIRTUAL),
    ("transformer", TENSOR_UNEQUAL),
    ("qwen3", TENSOR),
    ("gemma2", SHARDED_AGAIN),
    ("roberta", PIPE_AGAIN),
    ("whisper", PIPE),
    ("mixtral", EXPERTS),
    ("deepseek-v3", EXPERTS),
    ("clipped", "2 | tensor=2: (a b)=8@1:3 | c=8"),
    ("counted", "4 | tensor=2: (a b)=8 | tensor=2: (c d)=8@3:1"),
    ("llama", "2 | tensor=2: (a b)=4 (c d)=4"),
    ("transformer-dropout", "2 | recompute: a=8 | b=8"),
    ("adapted", PIPE),
)


def plan_of(graph: Graph, text: str, batch_size: int) -> Plan:
    """The plan that a case writes down, for this graph."""
    header, *stages = (part.strip() for part in text.format(last=len(graph.layers) - 1).split("|"))
    micro_batch, _, schedule = header.partition(" ")
    lines = [f"plan v1 graph=g cluster=c schedule={schedule or '1f1b'} batch={batch_size} micro_batch={micro_batch}"]
    bounds = even_cuts(graph, len(stages))
    for index, stage in enumerate(stages):
        options, _, replicas = stage.rpartition(": ")
        lines.append(f"stage {index}: layers {bounds[index]}-{bounds[index + 1] - 1} {options}: {replicas}")
    return msgspec.structs.replace(parse_plan("\n".join(lines) + "\n"), graph=graph.name)


def even_cuts(graph: Graph, stages: int) -> list[int]:
    """Where stages begin and the last one ends, as evenly as the graph can be cut."""
    cuts = list(graph.cuts)
    return [0, *(cuts[len(cuts) * i // stages] for i in range(1, stages)), len(graph.layers)]
