"""Muon on a CPU: torch's, with products in float32."""

import pytest
import torch

from areal_gym.config import TrainerConfig
from areal_gym.trainer.cpu_muon import CpuMuon, orthogonal
from areal_gym.trainer.optimizer import Optimizer
from tests._support.tiny_training import tiny_decoder

NEWTON_SCHULZ = {"coefficients": (3.4445, -4.775, 2.0315), "num_iterations": 5, "eps": 1e-7}


@pytest.mark.parametrize("shape", [(24, 96), (16, 64), (64, 16)])
def test_singular_values_become_nearly_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    orthogonalized = orthogonal(matrix, **NEWTON_SCHULZ)
    assert (orthogonalized.shape, orthogonalized.dtype) == (shape, torch.float32)
    values = torch.linalg.svdvals(orthogonalized)
    assert 0.6 < values.min() <= values.max() < 1.3  # as far as five iterations come
    # The directions stay: U V^T turns the matrix into one that is symmetric.
    u, _, v = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.trace((u @ v).T @ orthogonalized) > 0.8 * min(shape)


@pytest.mark.parametrize("shape", [(24, 24), (16, 64), (64, 16)])
def test_steps_are_those_of_torch_to_the_precision_of_bfloat16(shape):
    generator = torch.Generator().manual_seed(1)
    start = torch.randn(shape, generator=generator)
    gradients = [torch.randn(shape, generator=generator) for _ in range(4)]
    weights = []
    for kind in (torch.optim.Muon, CpuMuon):
        parameter = torch.nn.Parameter(start.clone())
        optimizer = kind([parameter], lr=0.02, weight_decay=0.1)
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        weights.append(parameter.detach())
        (state,) = optimizer.state.values()
        assert list(state) == ["momentum_buffer"]
    theirs, ours = weights
    assert (theirs - ours).norm() < 0.01 * (theirs - start).norm()
    assert not torch.equal(theirs, ours)


def test_a_trainer_on_a_cpu_takes_it():
    optimizer = Optimizer(tiny_decoder(), TrainerConfig(optimizer="muon"))
    assert [type(part) for part in optimizer.parts] == [torch.optim.AdamW, CpuMuon]
