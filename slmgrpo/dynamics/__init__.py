"""What training does to a model, each measure beside the value that no learning at all would give it."""
