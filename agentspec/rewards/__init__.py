"""Pure scoring of predicted calls and of final answers; no model, no clock."""
