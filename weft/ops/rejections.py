"""How operators reject a call: every collective one ends with

    except Exception as error:
        report(error, world)
        raise

so that no peer waits for a call that this rank does not make. A decorator would cost each repeated
call as much as the call itself.
"""

from __future__ import annotations

import torch

from weft.world import World, registry


def report(error: Exception, world: World | None) -> None:
    """Report to the peers in `world`, by default the default one, why this rank rejects the call in
    which they may be waiting; does nothing if the call itself has failed, which they know.
    """
    own = (registry.of_thread() or registry.default) if world is None else world
    if isinstance(own, World) and not torch.compiler.is_compiling():
        own.failure.reject(error)
