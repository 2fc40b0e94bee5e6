# Copyright 2026 The dlite-hf authors. Licensed under the Apache License, Version 2.0.
"""The trainers of the rivals are scripts, which lie outside the package."""

import sys
from pathlib import Path


TRAINING = Path(__file__).parents[2] / "training"
sys.path += [str(TRAINING), str(TRAINING / "baselines")]
