"""Who predicts the next call: one module per kind of speculator."""
