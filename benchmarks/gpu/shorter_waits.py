"""A plugin of pytest: worlds of tests give up after 8 seconds, so that a deadlock costs less."""

import weft

weft.local_world.__kwdefaults__["timeout"] = 8.0
