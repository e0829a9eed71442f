"""The job of swarm_speed.py: a GPT of one of the benchmarks' shapes. `atoll run benchmarks/swarm_speed_job.py … -- medium 16 12`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # where the models are

from lockstep_models import SHAPES, gpt_job

shape, batch, steps = sys.argv[1:4]
job = gpt_job(SHAPES[shape], batch=int(batch), steps=int(steps))
