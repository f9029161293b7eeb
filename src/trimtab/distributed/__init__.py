"""What ranks share: memory, process groups, and one word for "a rank is gone". Knows nothing of experts."""
