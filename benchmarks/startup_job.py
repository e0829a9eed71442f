"""The job of startup.py: that of examples/language_model.py, for as many steps as its argument says."""

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from language_model import job as whole

job = dataclasses.replace(whole, steps=int(sys.argv[1]))
del whole
