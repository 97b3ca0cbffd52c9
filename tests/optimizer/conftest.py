"""The synthetic model is shared with the tests of gradients."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "parallel_layers"))
