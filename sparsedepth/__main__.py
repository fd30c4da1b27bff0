"""`python -m sparsedepth`: the command line, where the script `sparsedepth` is not on the path."""

from sparsedepth.cli.main import run

if __name__ == "__main__":
    run()
