"""How nodes agree: the store, and the rounds that are decided in it. Knows nothing of worker processes."""
