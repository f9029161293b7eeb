"""Moves experts between ranks while they serve: staging, communicators, and the thread that does it."""
