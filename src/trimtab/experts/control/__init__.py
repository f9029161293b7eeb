"""The room that decides: load window, trigger, policies, the transaction. It runs in the engine's process; no torch."""
