"""Published throughputs, compared with the plan's predictions."""
