"""Placement policies: from a load and a placement to the next one. The live system and the planner run the same."""
