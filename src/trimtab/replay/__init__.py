"""Routed experts for trainers: files, exporters, forced routing in transformers models, and how far a trainer is off.

Names are imported when they are asked for: files and exporters need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.replay.exporters import (
        load_npy,
        save_npy,
        to_all_layers,
        to_int32_base64,
        to_moe_layers,
        to_npy_base64,
    )
    from trimtab.replay.forcing import replay_routed_experts
    from trimtab.replay.recording import record_routed_experts
    from trimtab.replay.report import ReplayReport, report_replay
    from trimtab.replay.routes import RoutedModel, Routes
    from trimtab.replay.routes_file import RoutesFile, save_routes

_HOMES = {
    "RoutedModel": "routes",
    "Routes": "routes",
    "RoutesFile": "routes_file",
    "save_routes": "routes_file",
    "to_moe_layers": "exporters",
    "to_all_layers": "exporters",
    "to_npy_base64": "exporters",
    "to_int32_base64": "exporters",
    "save_npy": "exporters",
    "load_npy": "exporters",
    "record_routed_experts": "recording",
    "replay_routed_experts": "forcing",
    "ReplayReport": "report",
    "report_replay": "report",
}

__all__ = [
    "ReplayReport",
    "RoutedModel",
    "Routes",
    "RoutesFile",
    "load_npy",
    "record_routed_experts",
    "replay_routed_experts",
    "report_replay",
    "save_npy",
    "save_routes",
    "to_all_layers",
    "to_int32_base64",
    "to_moe_layers",
    "to_npy_base64",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
