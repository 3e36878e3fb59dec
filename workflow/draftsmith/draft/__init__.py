"""The EAGLE-3 draft: its shape, the model, its loss and its metrics."""
