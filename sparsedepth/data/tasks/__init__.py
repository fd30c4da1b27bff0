"""Tasks whose needed depth is known: one file makes the sequences of one task, `stream` says which of them are met."""
