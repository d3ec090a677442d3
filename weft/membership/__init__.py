"""Membership: the ranks of a world that has lost some, or is joined by others, agree on the next.

For a rank, another one participates, is dead, or is unresponsive.

A rank participates once its request has come.

A rank is dead if the kernel of its host says so: its process has ended, or nothing listens at its
socket; if it has said itself that it leaves for good; or if a rank on its host knows that it is
dead, and says so. Between hosts nothing else counts, since a firewall can refuse connections,
reset them or drop them, and so can a host that has restarted.

A rank is unresponsive if it is neither, for as long as that takes.

The lowest rank that is not dead is the coordinator. It waits for the requests of all others that
are not dead, and for joiners, and decides once which ranks make the next world: all that
participate, if everybody else is dead; or, after its time limit, those that participate, if they
are more than half of the world's ranks, or exactly half of them with its rank 0. If neither holds,
all that participate raise `PeerTimeout`.

A rank adopts one decision for a world, ever, and the next world is made only when all of its ranks
have adopted it. Two decisions of a majority have a rank in common, and beside one for which
everybody else is dead nobody is left. So there are never two next worlds, and a rank that was
unresponsive and is left out learns of it from those that continued (`Excluded`).

If a rank of the next world is lost before it is made, the others agree again, from the decision.
The halves above are then counted twice: of the last world that was made, since other decisions may
have been adopted by ranks that this one cannot reach, and of the decided one, which may have
been made for others of its ranks. Only ranks with one decision agree again: in another one their
numbers mean others. So if a coordinator is killed between its answers, or is slow, and others
decide without it, each decision may lack ranks that have adopted another, and all raise
`PeerTimeout`.

A rank that waits for one on another host in vain asks the ranks beside that one, which find out
from their kernel. What a rank knows, and what follows, are pure functions (`weft.membership.view`).
"""
