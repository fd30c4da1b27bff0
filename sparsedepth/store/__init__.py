"""The record of every run as a folder, and SQL over many of them. Rows only: nothing here imports torch."""
