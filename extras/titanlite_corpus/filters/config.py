"""[filter]: which rules are applied, in which order; what a filter task depends on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from types import MappingProxyType
from typing import Any

from titanlite.data.manifest import hash_file
from titanlite.errors import ConfigError
from titanlite.settings import build_dataclass, raise_together
from titanlite_corpus.filters.blocklist import BlocklistConfig, BlocklistRule
from titanlite_corpus.filters.c4 import C4Config, C4Rule
from titanlite_corpus.filters.fineweb import FineWebConfig, FineWebRule
from titanlite_corpus.filters.gopher import GopherQualityConfig, GopherQualityRule
from titanlite_corpus.filters.language import LanguageConfig, LanguageRule
from titanlite_corpus.filters.length import LengthConfig, LengthRule
from titanlite_corpus.filters.personal_data import PersonalDataConfig, PersonalDataRule
from titanlite_corpus.filters.repetition import GopherRepetitionConfig, GopherRepetitionRule
from titanlite_corpus.filters.rule import Rule
from titanlite_corpus.filters.user_function import UserFunctionRule, hash_module


@dataclass(frozen=True)
class FilterConfig:
    """[filter] Remove and change documents, before duplicates are removed."""

    rules: list[str] = field(default_factory=list)
    # applied in the order of this list, which may have "length", "language", "gopher_quality",
    # "gopher_repetition", "c4", "fineweb", "blocklist", "personal_data", and functions of yours as
    # "package.module:function", which need --allow-code on the command line
    sources: list[str] = field(default_factory=list)  # names of sources to filter; empty: all
    length: LengthConfig = field(default_factory=LengthConfig)
    language: LanguageConfig = field(default_factory=LanguageConfig)
    gopher_quality: GopherQualityConfig = field(default_factory=GopherQualityConfig)
    gopher_repetition: GopherRepetitionConfig = field(default_factory=GopherRepetitionConfig)
    c4: C4Config = field(default_factory=C4Config)
    fineweb: FineWebConfig = field(default_factory=FineWebConfig)
    blocklist: BlocklistConfig = field(default_factory=BlocklistConfig)
    personal_data: PersonalDataConfig = field(default_factory=PersonalDataConfig)


# name in `filter.rules`, also of its section -> the class of the rule
RULES: Mapping[str, Callable[[Any], Rule]] = MappingProxyType(
    {
        "length": LengthRule,
        "language": LanguageRule,
        "gopher_quality": GopherQualityRule,
        "gopher_repetition": GopherRepetitionRule,
        "c4": C4Rule,
        "fineweb": FineWebRule,
        "blocklist": BlocklistRule,
        "personal_data": PersonalDataRule,
    }
)


def open_rules(config: FilterConfig) -> list[tuple[str, Rule]]:
    """The rules by name, in order; raises ConfigError with all their problems."""
    rules, problems = _open_valid_rules(config)
    raise_together(problems)
    return list(rules.items())


def check_filter(config: FilterConfig, allow_code: bool) -> list[ConfigError]:
    """Problems that the types of the settings do not exclude."""
    if not allow_code and (functions := [name for name in config.rules if ":" in name]):
        return [
            ConfigError(
                f"filter.rules contains {', '.join(functions)}: code, which is not allowed.",
                fix="If you trust it, allow it on the command line: --allow-code.",
            )
        ]
    return _open_valid_rules(config)[1]


def _open_valid_rules(config: FilterConfig) -> tuple[dict[str, Rule], list[ConfigError]]:
    """(the rules that can be opened, the problems of all others)."""
    rules: dict[str, Rule] = {}
    problems: list[ConfigError] = []
    for name in config.rules:
        try:
            if name in rules:
                raise ConfigError(f'filter.rules: contains "{name}" twice.')
            rules[name] = _open_rule(name, config)
        except ConfigError as error:
            problems.append(error)
    return rules, problems


def _open_rule(name: str, config: FilterConfig) -> Rule:
    if ":" in name:
        return UserFunctionRule(name)
    if name not in RULES:
        raise ConfigError(
            f'filter.rules contains "{name}", which is not a rule.',
            fix=f"Rules are {', '.join(RULES)}, and functions as package.module:function.",
        )
    return RULES[name](getattr(config, name))


def filter_arguments(config: FilterConfig) -> dict[str, Any]:
    """All that the result of the filter stage depends on, as JSON: the arguments of its tasks.

    Settings of rules that are not used are left out. Files, functions and the language model are
    there by their hash or version. Raises ConfigError with all problems.
    """
    open_rules(config)
    values = asdict(config)
    sections = {name: values[name] for name in config.rules if name in RULES}
    content = {name: hash_module(name) for name in config.rules if ":" in name}
    if "blocklist" in sections:
        paths = filter(None, (config.blocklist.words, config.blocklist.links))
        content |= {path: hash_file(Path(path)) for path in paths}
    if "language" in sections:
        content["py3langid"] = version("py3langid")
    return {
        "config": {"rules": config.rules, "sources": sorted(config.sources), **sections},
        "content": content,
    }


def config_of_arguments(arguments: dict[str, Any]) -> FilterConfig:
    """The settings that `filter_arguments` wrote."""
    config, problems = build_dataclass(FilterConfig, arguments["config"])
    raise_together(problems)
    return config
