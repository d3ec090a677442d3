"""The place of the native core in sources that are not built: importing it is an error with the
cure. A core that is built, as an extension module, is found before this file.
"""

import sys
from pathlib import Path

from weft.installation import command

raise ImportError(
    f"weft is imported from its sources in {Path(__file__).parents[1]}, which hide a weft that is "
    f"installed elsewhere, and have no native core for this Python {sys.version.split()[0]}: "
    f"run {command('cli')} once, or start Python in another folder",
    name=__name__,
    path=__file__,
)
