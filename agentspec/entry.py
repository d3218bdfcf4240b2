"""Starts a program: flags, ``--help``, and one line for whatever the user can mend.

In: a program's ``main`` and its required flags. Out: exit code 0; 2 for a wrong command line or
config; 1 for a file that cannot be used, or no file at all; 130 when interrupted. The line names
the key, or the file and its line. A fault of the program itself keeps its traceback.
"""

from __future__ import annotations

import contextlib
import functools
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

from absl import app, flags

from agentspec.configuration import ConfigError, check_key, key_type
from agentspec.workdir import RunError

Main = Callable[[Sequence[str]], None]

USAGE_ERRORS = (ConfigError, flags.Error, app.UsageError)
FILE_ERRORS = (RunError, OSError)
_NO_CONFIG = "get_config must return a ConfigDict with every key, as configs/common.py makes it"


def run(main: Main, required: Sequence[str] = (), errors: tuple[type[Exception], ...] = ()) -> None:
    """Parses the command line and calls ``main``; does not return.

    ``errors``: what ``main`` raises, beside ``FILE_ERRORS``, for files that cannot be used.
    """
    app.run(
        functools.partial(_guarded, main, (*FILE_ERRORS, *errors)),
        flags_parser=functools.partial(_parse_or_exit, required=required),
    )


def parse(
    argv: Sequence[str], required: Sequence[str] = (), values: flags.FlagValues = flags.FLAGS
) -> list[str]:
    """Sets the flags and returns the arguments that are none.

    Raises ``ConfigError`` naming the key, or file and line of the config, and ``flags.Error``.
    """
    for argument in argv[1:]:
        if argument == "--":
            break
        if override := re.match(r"--?(?:no)?config\.([^=]+)", argument):
            check_key(override[1])
    path = _config_path(argv)
    try:
        rest: list[str] = values(list(argv))
        if path is not None and values["config"].value is not None:
            _ = values["config"].value.keys  # a file that could not be read says so only now
    except Exception as error:  # a config file is a program: it may raise anything
        if path is not None and (reason := _fault_of_config(error, path)):
            raise ConfigError(reason) from error
        if clearer := _clearer(error, path):
            raise clearer from error
        raise
    for name in required:
        if values[name].value is None:
            if name == "config" and path is not None:
                raise ConfigError(f"{path}: {_NO_CONFIG}")
            raise app.UsageError(f"--{name} is missing; --help lists the options")
    return rest


def _clearer(error: Exception, path: str | None) -> Exception | None:
    """The same complaint in our words, where they say more than the flag library's."""
    if isinstance(error, flags.UnrecognizedFlagError) and path is None:
        if error.flagname.startswith("config."):
            return app.UsageError(f"--{error.flagname} needs --config=FILE as well")
    if path is not None and isinstance(error, (AttributeError, LookupError)):
        return ConfigError(f"{path}: {_NO_CONFIG}")
    if isinstance(error, SyntaxError):
        return ConfigError(
            "a --config.key=(...) on the command line is no Python value; write a tuple of texts "
            f"as '(\"a\", \"b\")', or one bare text: {error}"
        )
    if isinstance(error, flags.IllegalFlagValueError):
        if wrong := re.match(r"flag --config\.([^=]+)=(.*?): ", str(error), re.DOTALL):
            key, text = wrong.groups()
            return ConfigError(f"config key {key} must be {key_type(key)}, got {text!r}")
    return None


@contextlib.contextmanager
def reading(key: str, path: str) -> Iterator[None]:
    """Within it, an error whose text names the file ``path`` is a ``ConfigError`` of ``key``."""
    try:
        yield
    except (ValueError, OSError, ModuleNotFoundError) as error:
        if not path or path not in str(error):
            raise
        raise ConfigError(f"config key {key}: {error}") from error


def _config_path(argv: Sequence[str]) -> str | None:
    """The config file that the command line names, its variant left out; None for none."""
    for argument, following in zip(argv, [*argv[1:], ""], strict=True):
        if match := re.fullmatch(r"--?config(?:=(.*))?", argument):
            return (match[1] if match[1] is not None else following).split(":")[0]
    return None


def _fault_of_config(error: BaseException, path: str) -> str | None:
    """Where in the config file ``path`` it was raised and what; None if it was not raised there."""
    if not Path(path).is_file():
        return f"--config={path}: there is no such file in {Path.cwd()}"
    cause: BaseException | None = error
    found = None
    while cause is not None:
        if isinstance(cause, SyntaxError) and cause.filename:
            return f"{cause.filename}:{cause.lineno}: {cause.msg}"
        frames = traceback.extract_tb(cause.__traceback__)
        lines = [frame.lineno for frame in frames if Path(frame.filename) == Path(path)]
        if lines:
            found = f"{path}:{lines[-1]}: {type(cause).__name__}: {cause}"
        cause = cause.__cause__ or cause.__context__
    return found


def _parse_or_exit(argv: Sequence[str], required: Sequence[str]) -> list[str]:
    try:
        return parse(argv, required)
    except USAGE_ERRORS as error:
        _fail(error, 2)
    except SystemExit:  # absl leaves --help with 1
        raise SystemExit(0) from None


def _guarded(main: Main, errors: tuple[type[Exception], ...], argv: Sequence[str]) -> None:
    try:
        if len(argv) > 1:
            raise app.UsageError(f"unexpected arguments {list(argv[1:])}; --help lists the options")
        main(argv)
    except USAGE_ERRORS as error:
        _fail(error, 2)
    except errors as error:
        _fail(error, 1)
    except ModuleNotFoundError as error:  # of an extra; our own would be a fault of the program
        if (error.name or "agentspec").split(".")[0] == "agentspec":
            raise
        _fail(f"the package {error.name} is not installed; setup.py lists the extras", 1)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from the last save", file=sys.stderr)
        raise SystemExit(130) from None


def _fail(error: object, code: int) -> NoReturn:
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
    raise SystemExit(code)
