"""What a plan would take on a machine, and the machines that are known. Needs neither torch nor ranks."""

from weft.predict.forecast import ALGORITHMS as ALGORITHMS
from weft.predict.forecast import OPERATORS as OPERATORS
from weft.predict.forecast import ORDERS as ORDERS
from weft.predict.forecast import PIECES as PIECES
from weft.predict.forecast import UNEQUAL as UNEQUAL
from weft.predict.forecast import Candidate as Candidate
from weft.predict.forecast import Case as Case
from weft.predict.forecast import Forecast as Forecast
from weft.predict.forecast import candidates as candidates
from weft.predict.forecast import case as case
from weft.predict.forecast import changes as changes
from weft.predict.forecast import compute as compute
from weft.predict.forecast import forecast as forecast
from weft.predict.forecast import plan as plan
from weft.predict.forecast import planned as planned
from weft.predict.forecast import rank as rank
from weft.predict.forecast import savings as savings
from weft.predict.forecast import time as time
from weft.predict.forecast import trace as trace
