"""How experts' bytes travel: one contract (`base`), memory that ranks share, and Gloo."""
