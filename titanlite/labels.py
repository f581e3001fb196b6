"""The label values that data, models and validation agree on: the loss ignores all below 0."""

IGNORE_INDEX = -100  # as in torch.nn.CrossEntropyLoss
# Ignored too. Only packed sequences have these, and nothing else marks where a document ends there:
DOCUMENT_END = -101  # the next token begins another document
SAME_DOCUMENT = -102  # the next token belongs to the same document
