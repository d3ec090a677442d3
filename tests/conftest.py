"""Set-up of all tests: helpers are importable, and nothing is written to the user's cache."""

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
os.environ.setdefault("WEFT_CACHE", tempfile.mkdtemp(prefix="weft-test-cache-"))
