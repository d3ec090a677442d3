"""weft in vLLM on CPUs, by entry points that vLLM loads; ``VLLM_PLUGINS`` selects them.

`register` is the plug-in ``weft`` of group ``vllm.general_plugins``. vLLM calls it in its front
end, its engine and each of its workers.
"""

from __future__ import annotations

import os

from weft.vllm.settings import LAYERS, OFF, VARIABLE, setting


def register() -> None:
    """Run vLLM's groups of ranks on weft, and its parallel layers on weft's fused operators.

    Does nothing on platforms other than CPUs, nor with ``WEFT_VLLM=off``. With
    ``WEFT_VLLM=communicator`` the layers stay vLLM's. Raises where this vLLM lacks what it needs.
    """
    selected = setting(os.environ.get(VARIABLE))
    if selected == OFF:
        return
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from weft.vllm import surface

    surface.check()
    from vllm.model_executor.custom_op import op_registry_oot

    platform = type(current_platform)
    platform.dist_backend = "weft"
    platform.get_device_communicator_cls = classmethod(lambda cls: _COMMUNICATOR)
    from weft.vllm import experts, hosts, layers, norms

    experts.register()
    hosts.register()
    if selected == LAYERS:
        for layer in (*layers.LAYERS, norms.RMSNorm):
            if layer.__name__ not in op_registry_oot:
                layer.register_oot(layer, name=layer.__name__)


_COMMUNICATOR = "weft.vllm.communicator.Communicator"
"""vLLM's device communicator on weft: the collectives and messages of one of its groups."""
