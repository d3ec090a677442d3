"""Plans, the language in which work is described, and their proof. Neither torch nor ranks are
needed to make or prove a plan.
"""

from weft.plan.kernel import Kernel as Kernel
from weft.plan.language import Buffer as Buffer
from weft.plan.language import Compute as Compute
from weft.plan.language import Copy as Copy
from weft.plan.language import Instruction as Instruction
from weft.plan.language import Notify as Notify
from weft.plan.language import Plan as Plan
from weft.plan.language import Reduce as Reduce
from weft.plan.language import Region as Region
from weft.plan.language import Role as Role
from weft.plan.language import Signal as Signal
from weft.plan.language import Wait as Wait
from weft.plan.language import accesses as accesses
from weft.plan.language import reads as reads
from weft.plan.language import show as show
from weft.plan.language import writes as writes
from weft.plan.launch import Launch as Launch
from weft.plan.values import Applied as Applied
from weft.plan.values import Term as Term
from weft.plan.values import Value as Value
from weft.plan.values import reduced as reduced
from weft.plan.values import whole as whole
