"""What to run, and at what price: rows and configs only, never torch."""
