"""A plug-in of pytest: where WEFT_REPLACES_GLOO is 1, torchft's own tests find weft's group under
the name of gloo's. torchft makes gloo's group itself, which no variable changes.
"""

from __future__ import annotations

import os

if os.environ.get("WEFT_REPLACES_GLOO") == "1":
    import torchft
    from torchft import process_group

    from weft.torchft import ProcessGroupWeft

    torchft.ProcessGroupGloo = process_group.ProcessGroupGloo = ProcessGroupWeft
