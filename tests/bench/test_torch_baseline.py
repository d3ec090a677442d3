"""torch's own fused operators as a baseline, without a GPU: what they are asked for."""

from types import SimpleNamespace

from weft_tools.bench import fused_baselines


def test_torchs_fused_operator_is_not_asked_for_the_gathered_rows(monkeypatch):
    import torch.distributed._symmetric_memory  # registers the operators that are replaced

    asked = []

    def fused(a, weights, dim, group, *, return_A=True):
        asked.append(return_A)
        return None, [a @ weights[0]]

    monkeypatch.setattr(torch.ops, "symm_mem", SimpleNamespace(fused_all_gather_matmul=fused))
    world = SimpleNamespace(backend=SimpleNamespace(group=SimpleNamespace(group_name="0")))
    a, b = torch.rand(4, 3), torch.rand(3, 2)
    out = torch.empty(4, 2)
    call = fused_baselines.call_of("torch", "all_gather_matmul", a, b, out, [4], world)
    assert torch.equal(call(), a @ b)
    assert asked == [False]
