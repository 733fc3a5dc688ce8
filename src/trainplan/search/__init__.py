"""Which plans to try, in what order, and when to stop; and why the best is the best."""
