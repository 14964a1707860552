"""Makes what the tests of engines and rewards share importable here as well."""

import sys
from pathlib import Path

for room in ("engines", "models", "rewards"):
    sys.path.append(str(Path(__file__).parents[1] / room))
