"""Worlds of ranks: their start, shared memory, one-sided calls and failures."""

from weft.bootstrap.endpoint import Endpoint as Endpoint
from weft.launchers.reports import report_uncaught
from weft.membership.renewal import handle_of as handle_of
from weft.world.default import check_world as check_world
from weft.world.default import current as current
from weft.world.registry import by_number as by_number
from weft.world.registry import default_here as default_here
from weft.world.start import init as init
from weft.world.start import init_by_store as init_by_store
from weft.world.start import join as join
from weft.world.start import reconfigure as reconfigure
from weft.world.world import Recorder as Recorder
from weft.world.world import World as World

report_uncaught()
