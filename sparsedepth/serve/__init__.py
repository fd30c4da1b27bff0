"""A results folder as a page that refreshes while its sweep runs: read-only, and on this machine alone by default."""
