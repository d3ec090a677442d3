"""Predicted times of plans on machine models (`weft.predict.machine`), without torch or ranks."""

from weft.predict.collectives import COLLECTIVES as COLLECTIVES
from weft.predict.collectives import collective_candidates as collective_candidates
from weft.predict.forecast import Forecast as Forecast
from weft.predict.forecast import candidates as candidates
from weft.predict.forecast import changes as changes
from weft.predict.forecast import compute as compute
from weft.predict.forecast import forecast as forecast
from weft.predict.forecast import plan as plan
from weft.predict.forecast import planned as planned
from weft.predict.forecast import rank as rank
from weft.predict.forecast import savings as savings
from weft.predict.forecast import time as time
from weft.predict.forecast import trace as trace
from weft.predict.forecast import workload as workload
from weft.schedules.operators import OPERATORS as OPERATORS
from weft.schedules.workload import Variant as Variant
from weft.schedules.workload import Workload as Workload
