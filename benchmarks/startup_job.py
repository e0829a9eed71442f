"""The job of startup.py: that of examples/language_model.py, for a few steps."""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from language_model import job as whole

job = dataclasses.replace(whole, steps=3)
del whole
