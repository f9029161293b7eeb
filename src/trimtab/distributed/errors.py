"""What a rank raises when it cannot go on because of another one."""

from __future__ import annotations


class RankFailureError(RuntimeError):
    """Another rank did not take part in time, ended, or gave up. What was exchanged so far is lost; start anew."""
