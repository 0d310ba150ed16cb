"""The table of a magic's options. It parses the magic's line, lists the options in the help, and completes the line."""

from __future__ import annotations

import argparse
import functools
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from sparkring.errors import OptionsError


class Option:
    """One row of the table: an option (its flags begin with a dash) or an argument (its name does not).

    `settings` are passed to argparse's add_argument(). When the user presses Tab, `suggest` is called with the word at
    the cursor, and returns words that could replace this word. The words are values of the option or, if the option
    takes no value, of the argument that follows the option. If `alone` is true, the option cannot be combined with
    other options, so Tab offers no options after it.
    """

    def __init__(
        self,
        *names: str,
        help: str,
        suggest: Callable[[str], Iterable[str]] | None = None,
        alone: bool = False,
        **settings: Any,
    ) -> None:
        self.names, self.help, self.settings, self.suggest, self.alone = names, help, settings, suggest, alone

    @property
    def is_argument(self) -> bool:
        """Whether this row is an argument, which is recognised by its position on the line."""
        return not self.names[0].startswith("-")

    @property
    def is_required(self) -> bool:
        """Whether this row is an argument that the line must have."""
        return self.is_argument and self.settings.get("nargs") not in ("?", "*")

    @property
    def takes_value(self) -> bool:
        """Whether a value follows the flag."""
        return not str(self.settings.get("action", "")).startswith("store_")

    @property
    def can_repeat(self) -> bool:
        """Whether the option may be given more than once."""
        return self.settings.get("action") in ("append", "extend")

    @property
    def usage(self) -> str:
        """The option's names and the name of its value, as the help shows them."""
        choices = "|".join(self.settings.get("choices", ()))
        value = self.settings.get("metavar", choices) if self.takes_value else ""
        return value if self.is_argument else f"{'/'.join(self.names)} {value}".strip()

    def suggestions(self, current: str) -> list[str]:
        """Return the words that Tab offers at the cursor, where the user has typed `current`."""
        offered = self.suggest(current) if self.suggest is not None else self.settings.get("choices", ())
        return [word for word in offered if word.startswith(current)]


class OptionsTable:
    """All options of one magic. `magic` is the name of the magic, as users write it.

    `foreign` maps options of other programs, which users may type, to a sentence that says what there is instead.
    """

    def __init__(self, magic: str, *options: Option, foreign: Mapping[str, str] | None = None) -> None:
        self.magic = magic
        self._foreign = foreign or {}
        self.options = options
        self._by_flag = {name: row for row in options if not row.is_argument for name in row.names}
        self._argument = next((row for row in options if row.is_argument), None)

    @property
    def flags(self) -> set[str]:
        """Every flag that the magic takes."""
        return set(self._by_flag)

    def parse(self, line: str) -> dict[str, Any]:
        """Return the values of options by the options' names. Raise OptionsError if the line is not valid."""
        return self.parse_words(split_line(self.magic, line))

    def parse_words(self, words: Sequence[str]) -> dict[str, Any]:
        """Do the same as parse(), but for a line that has already been split into words."""
        for word in words:
            flag = word.partition("=")[0]
            if flag in self._foreign:
                raise OptionsError(f"{self.magic}: there is no {flag}. {self._foreign[flag]}")
        given = vars(self._parser.parse_args(self._joined(words)))
        for row in self.options:
            if row.can_repeat and (values := given.get(row.settings["dest"])):
                given[row.settings["dest"]] = tuple(
                    dict.fromkeys(values) if row.settings["action"] == "extend" else values
                )
        return given

    @functools.cached_property
    def _parser(self) -> argparse.ArgumentParser:
        # The parser is cached, because making a parser takes longer than running a whole cell on a warm gang.
        parser = _Parser(prog=self.magic, add_help=False, allow_abbrev=False)
        for row in self.options:
            parser.add_argument(*row.names, **row.settings)
        return parser

    def help(self) -> str:
        """Return the list of options for the magic's help."""
        width = max(len(row.usage) for row in self.options)
        return "\n".join(f"  {row.usage.ljust(width)}  {row.help}" for row in self.options)

    def complete(self, line: str) -> list[str]:
        """Return what Tab offers at the end of `line`, which is the magic's line up to the cursor.

        After an option that takes a value, Tab offers the option's values, if these are known. As long as a required
        argument is missing, Tab offers options only if the word at the cursor begins with a dash.
        """
        words = line.split()
        current = "" if line[-1:].isspace() or not words else words.pop()
        words = self._joined(words)
        previous = self._by_flag.get(words[-1]) if words else None
        if previous is not None and (previous.takes_value or previous.suggest):
            return previous.suggestions(current)
        if current.startswith("-"):
            return self._flags_left(words, current)
        missing = None if self._argument is None or self._has_argument(words) else self._argument
        offered = [] if current or (missing and missing.is_required) else self._flags_left(words, current)
        return offered + (missing.suggestions(current) if missing else [])

    def _flags_left(self, words: Sequence[str], current: str) -> list[str]:
        """Return the flags that begin with `current` and can still be added to `words`."""
        given = {row.names for word in words if (row := self._by_flag.get(word.partition("=")[0])) is not None}
        if any(row.alone and row.names in given for row in self.options):
            return []
        left = [name for name, row in self._by_flag.items() if row.can_repeat or row.names not in given]
        return [name for name in left if name.startswith(current)]

    def _has_argument(self, words: Sequence[str]) -> bool:
        """Whether one of the words is the argument, and not an option or the value of an option."""
        is_value = False
        for word in words:
            row = None if is_value else self._by_flag.get(word)
            if row is None and not is_value and not word.startswith("-"):
                return True
            is_value = row is not None and row.takes_value
        return False

    def _joined(self, words: Sequence[str]) -> list[str]:
        """Return the words with the number of ranks in a form that argparse understands: `--np=-2` for `-np -2`.

        argparse would read `-np` as `-n p`. `-n -2` becomes `--np=-2`, too, so that argparse takes any word after `-n`
        as the value. Otherwise, the error for `-n -2x` would be that the number is missing, not that it is wrong.
        """
        if "--np" not in self._by_flag:
            return list(words)
        joined: list[str] = []
        for word in words:
            if word.startswith("-np"):
                value = word[3:].removeprefix("=")
                word = f"--np={value}" if value else "--np"
            if joined and joined[-1] in ("-n", "--np") and word.startswith("-"):
                joined[-1] = f"--np={word}"
            else:
                joined.append(word)
        return joined


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser that raises OptionsError where argparse would print a message and exit."""

    def error(self, message: str) -> NoReturn:
        magic, _, _ = self.prog.partition(" ")  # IPython would look up `start` for `%gang start?`
        message += self._guess(message)
        raise OptionsError(f"{self.prog}: {message}. See {magic}? for the options.")

    def _guess(self, message: str) -> str:
        """Return a question with the option that was probably meant, if the message is about an unknown option."""
        import difflib

        if message.startswith("unrecognized arguments"):
            for word in message.split():
                for flag in difflib.get_close_matches(word.partition("=")[0], self._option_string_actions, 1):
                    return f" (did you mean {flag}?)"
        return ""

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise OptionsError((message or "").strip())


def split_line(magic: str, line: str) -> list[str]:
    """Split the line of a magic into words, as a shell would. Raise OptionsError if the line is not complete."""
    try:
        return shlex.split(line, comments=True)
    except ValueError as error:
        if line.rstrip().endswith("\\"):  # for a cell magic, IPython does not join lines
            raise OptionsError(
                f"{magic}: the options cannot continue on the next line. Write all of them on the line of {magic}."
            ) from None
        raise OptionsError(f"{magic}: {error} in {line!r}") from None


def asks_for_help(line: str) -> bool:
    """Whether the line of a magic contains -h or --help."""
    try:
        return not {"-h", "--help"}.isdisjoint(shlex.split(line, comments=True))
    except ValueError:  # a quote is not closed; the magic's own parser will say so
        return False
