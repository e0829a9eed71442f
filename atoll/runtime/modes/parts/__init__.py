"""Parts: models that learn from one another, each in a process of its own at its own site; what is declared crosses over the fabric."""
