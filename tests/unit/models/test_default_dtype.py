"""Networks are built while other threads do so too, and compute: the process's default dtype must stay what it was."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import nn

from trimtab.models import network
from trimtab.models.network import build_network, read_config
from trimtab.testing.checkpoints import make_tiny_checkpoint


def test_networks_are_built_one_at_a_time_so_the_default_dtype_is_put_back(tmp_path, monkeypatch) -> None:
    """As transformers does it: found, set, put back. Two threads at once would put back what the other one set."""
    both_inside = threading.Barrier(2)

    class Network:
        @staticmethod
        def _from_config(config: Any, dtype: torch.dtype, **options: Any) -> nn.Module:
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            try:
                both_inside.wait(0.2)
                raise AssertionError("two networks were built at once")
            except threading.BrokenBarrierError:
                return nn.Module()
            finally:
                torch.set_default_dtype(before)

    monkeypatch.setattr(network, "network_class", lambda config: Network)
    config = read_config(make_tiny_checkpoint(tmp_path))
    built = []
    threads = [
        threading.Thread(target=lambda: built.append(build_network(config, torch.bfloat16, "trimtab")))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(built) == 2
    assert torch.get_default_dtype() == torch.float32
