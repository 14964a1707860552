"""Makes the small models of the model tests importable here as well."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "models"))
