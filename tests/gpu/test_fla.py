"""The kernels of fla-core compute what torch's matmuls compute."""

from __future__ import annotations

import pytest
import torch

from titanlite.kernels.fla import try_fla_kernels
from titanlite.models import FAMILIES

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
FLAVORS = {"qwen3_next": "80B-A3B", "qwen3_5": "0.8B", "olmo_hybrid": "7B"}


@pytest.mark.parametrize("name", FLAVORS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_published_sizes_give_the_outputs_and_gradients_of_matmuls(name, dtype):
    pytest.importorskip("fla")
    sizes = FAMILIES[name].flavors[FLAVORS[name]]
    try_fla_kernels(sizes, 1, dtype, torch.device("cuda"))
