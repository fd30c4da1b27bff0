"""The command line. Each command imports what it needs when it runs, so that `--help` and `query` start fast."""
