"""The command line in the process of the tests."""

import pytest

from sparsedepth.cli.main import run


@pytest.fixture
def command(capsys):
    """The command line in this process; its output and its errors. The exit code must be `code`."""

    def call(*arguments, code=0):
        with pytest.raises(SystemExit) as ended:
            run(list(map(str, arguments)))
        out, err = capsys.readouterr()
        assert ended.value.code == code, err
        return out, err

    return call
