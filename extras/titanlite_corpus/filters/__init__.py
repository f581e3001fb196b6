"""Filters: rules that remove documents or change their text, vectorised over many documents."""

from titanlite_corpus.filters.apply import filter_documents, filter_table
from titanlite_corpus.filters.config import (
    FilterConfig,
    check_filter,
    filter_arguments,
    open_rules,
)

__all__ = [
    "FilterConfig",
    "check_filter",
    "filter_arguments",
    "filter_documents",
    "filter_table",
    "open_rules",
]
