"""transformers without its progress bars, also in the processes of ranks."""

import os

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
